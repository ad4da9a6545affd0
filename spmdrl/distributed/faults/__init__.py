"""Finds out which rank is missing, died or froze: start-up, heartbeats, one report."""
