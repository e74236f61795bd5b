"""`agentenv tokens`: show the tokens of a recorded episode, and score those of a run again."""
