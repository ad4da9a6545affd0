"""What dominates time and memory in training: LM head, scans, layers on CPUs."""
