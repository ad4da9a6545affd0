"""Checkpoints: format, writing in the background, safe reading, resume."""
