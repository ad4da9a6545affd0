"""Engines that train: FSDP2 around Hugging Face models."""
