"""Checks that an environment is fit for training: named properties, each of which returns its problems.

Read `context.py` (the target and its episodes) and `suite.py` (the properties by name, and `run_suite`) first, then
any of the properties. `agentenv check`, `agentenv.testing.EnvContract` and `agentenv.testing.check_env` run them.
"""
