"""Runs SGLang's own dispatch code in a separate interpreter and reads off what it decided."""
