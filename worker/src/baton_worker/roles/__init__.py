"""A worker process: the engine loop between link, KV transport and health HTTP."""
