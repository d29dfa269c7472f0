"""Launch scripts for a machine: topology -> roles -> settings -> files."""
