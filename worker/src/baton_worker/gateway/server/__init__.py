"""The gateway on the network: routes, keys, probes, and a service that joins every part.

The only room that knows how the others are put together.
"""
