"""Runs model-written Python where it can reach nothing."""
