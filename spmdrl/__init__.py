"""spmdrl: reinforcement learning for language models as one SPMD program."""
