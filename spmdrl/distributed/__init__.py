"""Ranks, groups, messages between them, and how they start and fail together."""
