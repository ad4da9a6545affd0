"""Rewards: `functions` has the built-in ones, `runner` runs yours. Imports nothing, since reward
workers import this package and must stay small.
"""
