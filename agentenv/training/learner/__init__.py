"""The learner: the policy, its critic and optimizer, and one train step."""
