"""What really goes wrong: one rule a file, each with the examples that are its tests."""
