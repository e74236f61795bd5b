"""Training on episodes: the arithmetic (advantages, losses, corrections, log-probabilities) and what drives it.

Import the modules: they need torch, and this package alone does not. One rule keeps observations out of everything:
the mask is applied once, by selection. `batch` picks the action tokens of all episodes onto one flat axis, log-probs
are computed for these alone, and every tensor after that has one entry per action token, in padded and packed batches
alike. Nothing is multiplied by a mask, so what stands between actions cannot reach a loss, not even as NaN.
"""
