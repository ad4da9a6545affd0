"""Rehearses a run: the user's config with a tiny model on this machine, and a review of it."""
