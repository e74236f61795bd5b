"""The version of this package; `agentenv.__version__`."""

__version__ = "0.1.0"
