"""Configs of other trainers, translated into one of ours: `python -m spmdrl.translate`."""
