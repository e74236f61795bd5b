"""Training on episodes: configuration, the loop, rollouts, the algorithm (tensors in, tensors out) and the learner.

Import the modules: they need torch, and this package alone does not.

Action tokens are selected once, in `algorithm/batch.py`: `build` puts the action tokens of all episodes
on one axis N, and every later tensor has one entry per action token.
"""
