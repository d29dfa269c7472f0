"""What a crash log says: reading it in one pass, known causes, the launch it belongs to."""
