"""SkyRL: our environments in its generators, and its dataset."""

from agentenv.interop.skyrl.generator import EnvGenerator, dataset

__all__ = ["EnvGenerator", "dataset"]
