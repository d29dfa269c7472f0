"""A doctor for serving the DeepSeek-V4 family with SGLang."""

__version__ = "0.1.0"
