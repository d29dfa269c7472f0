"""Which GPUs a kernel was made for, read from what is installed and never by running it."""
