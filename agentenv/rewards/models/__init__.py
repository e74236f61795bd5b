"""Reward models: what scores a conversation with a network, wherever it runs. See `types.py` for what they share."""
