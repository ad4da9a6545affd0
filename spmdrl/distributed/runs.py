"""The names of the programs that import torch, and take seconds for it. Imports nothing."""

RUNS = ("launch", "ppo", "sft", "preference", "reward_model", "evaluate", "export", "replay")
