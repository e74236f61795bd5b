"""`agentenv audit`: runs an environment with policies that solve nothing, and reports what they earn.

Read `policies.py` (the policies), `episodes.py` (their episodes), `facts.py` (what is known of them), `judging.py` and
`leaks.py` (what is wrong), `findings.py` (every kind of finding and why it matters), and last `auditing.py`, which runs
all of it.
"""
