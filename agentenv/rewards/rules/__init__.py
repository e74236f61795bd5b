"""Rewards by rule; `rewards/registry.py` has their names."""
