"""`agentenv tokens`: show, compare and score again the tokens of a recorded episode."""
