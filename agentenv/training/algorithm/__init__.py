"""The algorithm, tensors in and tensors out: batches, advantages, corrections and losses."""
