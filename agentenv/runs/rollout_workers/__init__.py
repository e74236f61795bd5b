"""`--rollout_workers`: processes that run episodes, each for many at once."""
