"""Who runs in the next step: requests, their waiting queue, cached prefixes, plan and batch.

Owns a request's life inside the engine and every block it holds. Knows no model: it plans tokens
and blocks, never numbers.
"""
