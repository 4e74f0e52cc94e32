"""The paged KV cache: who owns which block, and where each token's KV lives.

Owns blocks and slots. Knows no request, no model and no framework.
"""
