"""FSDP2 around Hugging Face models."""
