"""Rewards for bounding boxes."""
