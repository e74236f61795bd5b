"""The escape matrix: hostile programs, each of which a level of isolation must contain.

Start with `cases.py`, then read `run.py`. `python -m agentenv.sandbox.escapes LEVEL` runs all of them.
"""
