"""Runs inside the target interpreter: standard library and that interpreter's packages only."""
