"""Tensor parallelism: one worker's model over several processes, of which rank 0 alone speaks."""
