"""A whole deployment on one machine: gateway and workers as processes on loopback."""
