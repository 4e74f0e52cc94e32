"""The model engine: weights, KV pool, scheduler and the step loop. No sockets."""
