"""Functions with the interface that SGLang calls, one file per operation."""
