"""`tools/version.py`: one version, repeated where packagers need it, and never two."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import version

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("VERSION", "CHANGELOG.md", *version.PLACES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_every_place_repeats_the_version():
    assert list(version.disagreements(ROOT)) == []


def test_a_new_version_reaches_every_place_and_asks_for_its_heading(checkout):
    version.write("7.11.13", checkout)
    assert list(version.disagreements(checkout)) == ["CHANGELOG.md: no heading '## 7.11.13'"]
    chart = (checkout / "charts/baton/Chart.yaml").read_text()
    assert "\nversion: 7.11.13\nappVersion: 7.11.13\n" in chart


@pytest.mark.parametrize("name", version.PLACES)
def test_a_place_that_says_another_version_is_named(checkout, name):
    path = checkout / name
    path.write_text(path.read_text().replace(version.the_version(checkout), "9.9.9"))
    found = list(version.disagreements(checkout))
    assert found
    assert all(line.startswith(f"{name}: 9.9.9") for line in found)


def test_a_place_that_lost_its_version_is_named(checkout):
    (checkout / "ops/pyproject.toml").write_text("[project]\n")
    (found,) = version.disagreements(checkout)
    assert found.startswith("ops/pyproject.toml: no line")


@pytest.mark.parametrize("text", ["1.2", "v1.2.3", "1.2.3rc1", "", "1.2.3\n4.5.6"])
def test_what_packagers_and_helm_do_not_both_take_is_refused(checkout, text):
    before = (checkout / "VERSION").read_text()
    with pytest.raises(ValueError, match="three numbers"):
        version.write(text, checkout)
    assert (checkout / "VERSION").read_text() == before
