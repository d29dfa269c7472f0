"""Source patches for an installed SGLang: one fix a file."""
