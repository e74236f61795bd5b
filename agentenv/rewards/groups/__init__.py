"""Rewards of all answers to one task together: comparisons, tournaments, functions."""
