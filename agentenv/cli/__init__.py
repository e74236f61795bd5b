"""The commands of `agentenv`, one file for each; `main` chooses."""
