"""NeMo Gym: an agent server that runs our episodes."""

from agentenv.interop.nemo_gym.server import GymOptions, GymServer

__all__ = ["GymOptions", "GymServer"]
