"""Environments in actors: processes that each host the agent instances of many episodes, outside the engine's process.

The episode loop stays in the engine's process and calls `reset`, `step`, `on_truncate` and `close` remotely. An actor
that dies or whose event loop is blocked is replaced; its episodes fail with InfraError and are retried. `local` has
the actors that are processes of this machine; `agentenv.runs.env_actors` those of Ray.
"""
