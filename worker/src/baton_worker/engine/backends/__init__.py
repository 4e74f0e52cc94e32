"""What computes a step's numbers: Paddle on a processor, several ranks of it, or no model at all.

The only room that may import a framework. The rest of the engine knows `step.forward.ForwardModel`
and `kv.pool` instead.
"""
