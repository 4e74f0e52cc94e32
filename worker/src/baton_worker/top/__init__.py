"""`baton-worker top`: a running deployment in a terminal, from its metrics endpoints alone."""
