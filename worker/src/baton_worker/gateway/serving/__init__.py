"""Which workers serve a request, when, and what happens when one of them fails.

Owns the waiting queue, the choice of workers, live requests and their retries. Knows no HTTP and
no JSON.
"""
