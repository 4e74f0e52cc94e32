"""The API server as the operator sees it: requests, watches, the store of children, leadership.

Owns what is known of the cluster. Decides nothing.
"""
