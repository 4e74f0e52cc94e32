"""A command in namespaces of its own: network, mounts and processes that end with it.

The whole cluster runs inside for tests: its bridge, firewall rules, mounts and processes never
touch this machine's, and are gone when the command ends, however it ends. What it writes below
/run, /var/lib and /var/log stays inside too. No packet leaves: the only way out is a bridge without
ports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

OUTSIDE_ADDRESS = "198.18.0.1"
"""What the node takes for its machine's address; from the range for tests between networks."""

_SETUP = f"""
set -e
mount -t tmpfs tmpfs /run
for place in /var/lib /var/log; do
  over=/run/over$place
  mkdir -p $over/upper $over/work
  mount -t overlay overlay -o lowerdir=$place,upperdir=$over/upper,workdir=$over/work $place
done
ip link set lo up
ip link add outside type bridge
ip addr add {OUTSIDE_ADDRESS}/24 dev outside
ip link set outside up
ip route add default dev outside
"$@"
"""
"""The shell stays: as the first process of its namespace it reaps what others leave."""

_UNSHARE = (
    "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
)  # fmt: skip


def run_isolated(words: Sequence[str]) -> NoReturn:
    """Become a command inside new namespaces; its exit code is ours.

    Raises:
        OSError: `unshare` cannot be run.
    """
    sys.stdout.flush()
    os.execvp(_UNSHARE[0], [*_UNSHARE, "sh", "-c", _SETUP, "sh", *words])
