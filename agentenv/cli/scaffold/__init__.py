"""`agentenv new`: a plugin of a person's own, from the files in `template/`."""
