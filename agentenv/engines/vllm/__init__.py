"""vLLM as an engine: in this process, or a server."""
