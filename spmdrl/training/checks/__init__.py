"""Is a config sound; what a run will need."""
