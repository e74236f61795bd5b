"""What an environment must hold so that it can be trained with: named properties, each of which gives problems.

Read `scene.py` (what is checked, and on which episodes), `suite.py` (the properties by name, and how they are run),
then one of them. `agentenv check`, `agentenv.testing.EnvContract` and `agentenv.testing.check_env` run them.
"""
