"""An environment of OpenEnv for the tests whose actions are calls of tools."""
