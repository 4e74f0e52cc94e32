"""What a PDDeployment shall become next, from counts: scaling, rollouts, gateways, deadlines.

Pure: no client, no clock, no Kubernetes object. Times and counts come in as values.
"""
