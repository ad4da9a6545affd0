"""Engines that train: FSDP2 around Hugging Face models, Megatron-core with its own."""
