"""A Hugging Face model sampled in a loop of our own."""
