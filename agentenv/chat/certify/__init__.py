"""Proof that a model's chat template keeps the tokens: `agentenv tokens certify`."""
