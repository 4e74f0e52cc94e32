"""The simulated model: an engine without weights, for tests of fleets."""
