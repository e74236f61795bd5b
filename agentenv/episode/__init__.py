"""The one loop that samples and steps, and what runs many episodes."""
