"""Rewards and reward models over HTTP: `agentenv rm serve`."""
