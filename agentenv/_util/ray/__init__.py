"""Ray: sessions, actors and their errors."""
