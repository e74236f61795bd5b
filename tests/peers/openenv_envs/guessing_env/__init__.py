"""An environment of OpenEnv for the tests: its numbers come from the global random numbers, whatever the seed."""
