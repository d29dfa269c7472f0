"""Records in a running SGLang server what a trace predicts; see docs/recording.md."""
