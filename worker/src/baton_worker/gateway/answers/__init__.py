"""How deltas become what a client reads: OpenAI's shapes, as events or one body.

Knows no worker and no record.
"""
