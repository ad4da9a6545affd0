"""vLLM inside the ranks."""
