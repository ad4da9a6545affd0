"""Engines that sample: vLLM inside the ranks, or Hugging Face models in a loop of our own."""
