"""HTTP: one client with one retry policy, and the servers' framework."""
