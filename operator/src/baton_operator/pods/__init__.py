"""What ready pods say of themselves: the only way into the data plane, and only to read.

Knows the pod contract's HTTP and metrics, and no plan.
"""
