"""The environments that ship with agentenv; each is an entry point in the group `agentenv.envs`.

PYTEST_DONT_REWRITE: see `agentenv`.
"""
