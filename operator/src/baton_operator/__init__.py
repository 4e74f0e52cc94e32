"""The Baton operator: turns PDDeployments into served models on Kubernetes.

Knows workers only by the pod contract (configuration file, health HTTP, drain, wire metric); never
imports `baton_worker` or `baton_ops`.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
