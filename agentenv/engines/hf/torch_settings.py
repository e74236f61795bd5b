"""Settings of torch that hold for the whole process."""

import torch

NUM_TORCH_THREADS = torch.get_num_threads()
"""Threads when this process began to use torch: from OMP_NUM_THREADS, from a call before, or one per core.

`torch.set_num_threads` holds for the process and for the calling thread, not for threads that computed before. Who
computes therefore sets the number each time, so that a sum of float32 has the same last bits in every run."""


def disable_cudnn_attention() -> None:
    """Keep `scaled_dot_product_attention` from cuDNN, which torch prefers on Hopper GPUs.

    cuDNN prepares a plan in each call with a new length, and lengths of episodes differ: on an H200 a decode step of 24
    layers took 96 ms with it and 23 ms without.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
