"""Environments in Ray actors: many episodes' agent instances in each, apart from the engine's process and each other's.

The loop stays where the engine is; `reset`, `step`, `on_truncate` and `close` cross. An actor that dies, or whose event
loop is held up, is replaced; the episodes that it hosted fail as infrastructure does and are tried again.
"""
