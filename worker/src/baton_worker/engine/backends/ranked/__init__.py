"""Tensor parallelism over GPUs: a worker's ranks as processes, of which rank 0 alone speaks."""
