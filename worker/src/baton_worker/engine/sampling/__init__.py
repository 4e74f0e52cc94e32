"""From logits to tokens and logprobs: processing, choice, verification of drafts, scores.

Pure functions of a step's logits and its batch. Knows no model, no KV, and not what becomes of a
token.
"""
