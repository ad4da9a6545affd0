"""Explains why trainer and rollout engine give a token different log-probabilities."""
