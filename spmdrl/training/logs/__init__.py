"""Metrics, trackers, traces, profiles."""
