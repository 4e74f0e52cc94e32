"""The number of what may be called here, and how: the one thing that callers ask before all else.

It rises whenever a function comes, goes, or takes or means something else than before, also where
only shapes tell: a library of another number would refuse at the first such call, minutes into a
start, or compute something else. The library holds it too (`csrc/export.cc`), and who calls these
functions holds the number that it was written for. Knows no op.
"""

from __future__ import annotations

INTERFACE = 3
