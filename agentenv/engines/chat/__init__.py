"""API models: any server with OpenAI's chat completions, for runs without token ids."""
