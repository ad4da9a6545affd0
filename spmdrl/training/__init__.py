"""One step, the loops around it, and what a run writes."""
