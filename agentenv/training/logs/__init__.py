"""Records of a training run: metrics, trackers, the screen and the plot."""
