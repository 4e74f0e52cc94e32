"""One step: the forward pass, the choice, new drafts, and what failed in it.

Owns the order of a step. Knows a model only as `forward.ForwardModel`, and no backend.
"""
