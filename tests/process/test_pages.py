"""The generated pages say what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import get_args, get_type_hints

import msgspec

from baton_worker.config import ProcessConfig, load_config

ROOT = Path(__file__).resolve().parents[2]


def test_metrics_and_configuration_pages_are_current():
    command = [sys.executable, str(ROOT / "tools" / "pages.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_configuration_pages_files_are_read_and_meet(tmp_path):
    page = (ROOT / "docs" / "configuration.md").read_text()
    files = re.findall(r"```yaml\n# (\w+)\.yaml\n(.*?)```", page, re.DOTALL)
    configs = {}
    for name, text in files:
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        configs[name] = load_config(path)
    assert set(configs) == {"gateway", "worker"}
    assert configs["worker"].link.gateways == (configs["gateway"].link.bind,)
    assert not any(config.link.curve.enabled for config in configs.values())
    assert all((ROOT / config.model.path).is_dir() for config in configs.values())


def sections(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    yield struct
    for kind in get_type_hints(struct).values():
        for part in get_args(kind) if isinstance(kind, UnionType) else (kind,):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from sections(part)


def test_every_setting_is_explained_where_it_stands():
    for section in sections(ProcessConfig):
        for field in msgspec.structs.fields(section):
            is_section = any(
                isinstance(part, type) and issubclass(part, msgspec.Struct)
                for part in (field.type, *get_args(field.type))
            )
            assert is_section or f"`{field.name}`" in section.__doc__, (section, field.name)
