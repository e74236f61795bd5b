"""The pytest plugin: fixtures and the marker `agentenv`."""
