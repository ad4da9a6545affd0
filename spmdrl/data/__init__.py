"""Rows of files -> prompts, token ids, images, packed batches."""
