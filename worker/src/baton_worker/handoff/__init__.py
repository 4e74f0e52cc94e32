"""KV transfer from prefill to decode: acknowledged, deduplicated, bounded by a deadline."""
