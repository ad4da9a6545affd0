"""SGLang inside the ranks."""
