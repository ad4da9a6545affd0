"""Reads what a Hugging Face folder says and holds: config, own code, tokenizer, files."""
