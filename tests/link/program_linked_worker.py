"""A worker process with a link and nothing behind it. Meant to be killed.

Usage: program_linked_worker.py CONFIG_FILE. Reads its `ProcessConfig` and says `linked` once a
gateway has welcomed it; a child that it starts keeps none of its connections alive.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton_worker.config import load_config
from baton_worker.identity import Role
from baton_worker.link.api import GatewayUp
from baton_worker.link.worker import ZmqWorkerLink
from baton_worker.messages import WorkerInfo
from baton_worker.metrics import MetricFactory


def main(path: Path) -> None:
    config = load_config(path)
    info = WorkerInfo(
        worker_id=config.worker_id,
        role=int(Role.PREFILL),
        wire_min=1,
        wire_max=1,
        semantic_hash=1,
        config_hash="c0",
        revision="",
        model="tiny",
        vocab_size=256,
        max_model_len=128,
        max_top_k=20,
        max_running=8,
        max_waiting=8,
        kv_capacity_tokens=1024,
    )
    factory = MetricFactory(CollectorRegistry(), "tiny", "prefill")
    link = ZmqWorkerLink(config.link, info, factory)
    is_linked = threading.Event()
    link.start(lambda event: is_linked.set() if isinstance(event, GatewayUp) else None)
    is_linked.wait()
    # Like a rank of a tensor-parallel worker, it ends when its standard input does.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL):
        sys.stdout.write("linked\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
