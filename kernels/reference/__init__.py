"""Float32 references of the kernels, in plain torch."""
