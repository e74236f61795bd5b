"""Sandboxes whose programs run elsewhere: in a container, or on a Ray node."""
