"""The reward service: scores samples, filters groups, computes advantages."""
