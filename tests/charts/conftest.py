"""helm over the chart: rendering with values, as objects."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_cluster.programs import ready_program

CHART = Path(__file__).resolve().parents[2] / "charts" / "baton"

Manifest = dict[str, Any]
Render = Callable[..., list[Manifest]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hold a minute of helm processes out of the fast tests."""
    for item in items:
        is_helms = "helm" in getattr(item, "fixturenames", ())
        if is_helms and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


class HelmError(Exception):
    """helm refused; the text is what it said."""


@pytest.fixture(scope="session")
def chart() -> Path:
    """Return the chart's folder."""
    return CHART


@pytest.fixture(scope="session")
def helm() -> Callable[..., str]:
    """Return a function that runs helm and returns its output."""
    program = ready_program("helm")
    if program is None:
        pytest.skip("helm is not built yet: `make chart` builds it")

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(program), *words], capture_output=True, text=True, check=False, timeout=100
        )
        if done.returncode:
            raise HelmError(done.stdout + done.stderr)
        return done.stdout

    return run


@pytest.fixture(scope="session")
def render(helm: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Return a function that renders the chart with values given as YAML text."""
    path = tmp_path_factory.mktemp("values") / "values.yaml"

    @cache
    def rendered(values: str, release: str, namespace: str) -> str:
        path.write_text(values)
        words = ["template", release, str(CHART), "--namespace", namespace, "--values", str(path)]
        return helm(*words)

    def run(
        values: str = "", *, release: str = "baton", namespace: str = "system"
    ) -> list[Manifest]:
        text = rendered(values, release, namespace)
        # LibYAML: the pure Python parser takes longer than helm.
        return [body for body in yaml.load_all(text, Loader=yaml.CSafeLoader) if body]

    return run


@pytest.fixture(scope="session")
def refusal(render: Render) -> Callable[[str], str]:
    """Return a function that gives helm's words on values that it must refuse."""

    def run(values: str) -> str:
        with pytest.raises(HelmError) as caught:
            render(values)
        return str(caught.value)

    return run


@pytest.fixture(scope="session")
def one() -> Callable[..., Manifest]:
    """Return a function that finds exactly one object by kind and end of name."""

    def find(objects: list[Manifest], kind: str, suffix: str = "") -> Manifest:
        found = [
            body
            for body in objects
            if body["kind"] == kind and body["metadata"]["name"].endswith(suffix)
        ]
        assert len(found) == 1, f"{len(found)} objects of kind {kind} ending in {suffix!r}"
        return found[0]

    return find
