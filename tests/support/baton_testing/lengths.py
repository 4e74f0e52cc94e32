"""How long the longest searches go: their whole length in `make slow LONG=1`, a part of it in
`make test`, which is to end in about an hour on two processors.
"""

import os

IS_WHOLE = "BATON_LONG" in os.environ


def length(whole: int, part: int) -> int:
    """Return how many examples, requests or lives a search tries in this run."""
    return whole if IS_WHOLE else part
