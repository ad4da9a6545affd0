"""Engines that sample: vLLM inside the ranks, or Hugging Face `generate`."""
