"""Helpers that know nothing of episodes."""
