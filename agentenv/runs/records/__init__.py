"""A run directory: its files, their lines, and reading them again."""
