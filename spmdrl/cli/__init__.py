"""From the command line and a config file to a config value. Imports no torch."""
