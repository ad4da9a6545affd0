"""Agents that speak to an HTTP endpoint inside the ranks, and the rows that are trained on."""
