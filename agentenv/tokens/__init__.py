"""`agentenv tokens`: what a chat template does, shown and proved; the tokens of an episode, shown, compared, scored."""
