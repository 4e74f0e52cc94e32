"""One pass over one PDDeployment, and the machine that decides when there is one.

The only room that joins planning, children, pods and status.
"""
