"""One pass over one PDDeployment, and the controller that decides when there is one.

The only room that joins planning, children, pods and status.
"""
