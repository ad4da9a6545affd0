"""Rewards: `builtin` has ready ones, `runner` runs yours. Workers import it: nothing else here."""
