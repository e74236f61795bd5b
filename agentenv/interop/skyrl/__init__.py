"""SkyRL: our environments in its generators, its dataset, and episodes as rows of its GeneratorOutput."""

from agentenv.interop.skyrl.generator import EnvGenerator, dataset
from agentenv.interop.skyrl.records import from_records, to_records

__all__ = ["EnvGenerator", "dataset", "from_records", "to_records"]
