"""Builders of child objects, one module a kind: pure functions from spec to manifest.

No client, no clock, no environment; what no spec says, fresh keys, is passed in. Every pod they
describe passes restricted pod security.
"""
