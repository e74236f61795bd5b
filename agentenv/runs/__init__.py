"""`agentenv run` and `agentenv.rollout`: the job, its records, metrics and screen."""
