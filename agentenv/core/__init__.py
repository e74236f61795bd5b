"""What an episode is: types, the trajectory, the protocols of agents and engines."""
