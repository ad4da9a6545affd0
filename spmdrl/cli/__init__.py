"""Makes a config value from the command line and a config file. Imports no torch."""
