"""Weights on their way from the trainer's shards to the engine."""
