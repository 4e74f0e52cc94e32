"""Baton's worker image: the engine, its roles, the record link and the OpenAI gateway."""

__version__ = "0.1.0"
