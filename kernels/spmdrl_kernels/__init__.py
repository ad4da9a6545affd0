"""Kernels of spmdrl. Each stands beside its plain PyTorch form; on CPUs that form is what runs."""
