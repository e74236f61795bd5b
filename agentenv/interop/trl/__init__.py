"""TRL's GRPOTrainer over our episodes: its `rollout_func`, its dataset and reward function, and its records."""

from agentenv.interop.trl.records import from_records, to_records
from agentenv.interop.trl.rollout import EnvRollout, dataset, reward

__all__ = ["EnvRollout", "dataset", "from_records", "reward", "to_records"]
