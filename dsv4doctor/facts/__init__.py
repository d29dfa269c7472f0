"""What is there: GPUs, checkpoint, packages and SGLang tree, and the snapshot of all of it."""
