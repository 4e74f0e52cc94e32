"""What the operator serves over HTTP: liveness, readiness, metrics, to few peers at a time."""
