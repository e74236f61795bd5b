"""Episode sources whose environments live in actors, as `agentenv.episode.env_actors` has them: local ones or Ray's."""
