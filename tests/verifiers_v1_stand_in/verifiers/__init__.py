"""A stand-in of the package verifiers 0.4, which has no classic API."""
