"""Delivery of step records and commands between workers and gateways, at least once, in order."""
