"""`agentenv audit`: plays an environment with policies that solve nothing, and says what they earn.

Read `policies.py` (who plays), `plays.py` (an episode of the one loop), `judging.py` and `leaks.py` (what is wrong),
`findings.py` (each kind and why it matters), then `auditing.py`, which does all of it.
"""
