"""A transformers model as an engine, in this process."""
