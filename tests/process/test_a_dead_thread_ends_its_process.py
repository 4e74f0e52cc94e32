"""A process whose link is gone ends: its exit code tells who restarts it, its log tells people."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    CurveConfig,
    GatewayConfig,
    HttpConfig,
    LinkConfig,
    ModelConfig,
    ProcessConfig,
    dump_config,
)
from baton_worker.faults import EXIT_FAULT

WITH_A_DEFECT = """
import sys
from baton_worker.gateway.serving.live_requests import LiveRequests
from baton_worker.link.switchboard import Switchboard
from baton_worker.main import main

def broken(self):
    raise RuntimeError("a defect")

{defect} = broken
sys.exit(main(["gateway", "--config", sys.argv[1]]))
"""


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("defect", "told"),
    [
        ("Switchboard.tick", "thread died; ending the process which=baton-link"),
        ("LiveRequests.__len__", "an essential task broke; ending where=housekeeping"),
    ],
    ids=["link", "housekeeping"],
)
def test_a_gateway_does_not_outlive_its_link_and_its_housekeeping(
    tmp_path: Path, defect: str, told: str
) -> None:
    link = LinkConfig(bind="tcp://127.0.0.1:0", curve=CurveConfig(enabled=False))
    config = ProcessConfig(
        model=ModelConfig(str(TINY_MODEL)),
        link=link,
        gateway=GatewayConfig(http=HttpConfig(port=0)),
    )
    path = tmp_path / "gateway.yaml"
    path.write_bytes(dump_config(config))
    ended = subprocess.run(
        [sys.executable, "-c", WITH_A_DEFECT.format(defect=defect), str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode == EXIT_FAULT, ended.stderr
    assert told in ended.stderr
    assert "a defect" in ended.stderr
