"""Changes an SGLang tree's sources so that every step can be taken back."""
