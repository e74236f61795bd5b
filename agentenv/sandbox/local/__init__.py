"""The sandbox of this machine, the part that runs in the trainer's process."""
