"""Environments in Ray actors. Each actor hosts the agent instances of many episodes, outside the engine's process.

The episode loop stays in the engine's process and calls `reset`, `step`, `on_truncate` and `close` remotely. An actor
that dies or whose event loop is blocked is replaced; its episodes fail with InfraError and are retried.
"""
