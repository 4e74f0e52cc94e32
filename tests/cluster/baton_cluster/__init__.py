"""Real Kubernetes on one machine without a container runtime or a registry, for tests.

`programs` gets the binaries, `control_plane` runs an API server, `node` adds a kubelet with real
containers. Knows nothing of the operator; `python -m baton_cluster` is its command line.
"""
