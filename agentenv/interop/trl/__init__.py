"""TRL's GRPOTrainer over our episodes: its `rollout_func`, its dataset and reward function."""

from agentenv.interop.trl.rollout import EnvRollout, dataset, reward

__all__ = ["EnvRollout", "dataset", "reward"]
