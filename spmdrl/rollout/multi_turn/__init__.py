"""Tools and environments between the turns of a sample."""
