"""Whole samples of steps, and what runs a step again from them (spmdrl.replay)."""
