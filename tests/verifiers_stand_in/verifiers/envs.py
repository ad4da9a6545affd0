"""By this module an environment's server knows that the classic API is there."""
