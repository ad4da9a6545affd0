"""Holds a run on CPUs to the rules of NCCL, which gloo does not have."""
