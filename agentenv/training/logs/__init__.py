"""Records of a training run: metrics, trackers and the screen."""
