"""The GPU suite's stamp names what has changed since, and a release may not go past it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import gpu_stamp
import pytest
from hypothesis import given
from hypothesis import strategies as st

FILES = {"ops/csrc/cuda/a.cu": "1" * 16, "ops/include/b.cuh": "2" * 16}


def stamp_of(files, **results):
    counts = {"passed": 3, "failed": 0, "skipped": 0} | results
    return gpu_stamp.Stamp(
        commit="abc1234",
        content=gpu_stamp.content_of(files),
        files=files,
        results=gpu_stamp.Results(**counts),
        machine={"gpu": "H200"},
        digests={"tiny": "f" * 64},
    )


def test_a_stamp_of_the_same_code_says_nothing_and_lets_a_release_go():
    stamp = stamp_of(FILES)
    assert gpu_stamp.note(stamp, FILES) == ""
    assert gpu_stamp.in_the_way_of_a_release(stamp, FILES) == []


def test_each_file_that_changed_came_or_went_is_named():
    now = {"ops/csrc/cuda/a.cu": "3" * 16, "ops/include/new.cuh": "4" * 16}
    told = gpu_stamp.moved(stamp_of(FILES), now)
    assert told == [
        "ops/csrc/cuda/a.cu: changed",
        "ops/include/b.cuh: gone",
        "ops/include/new.cuh: new",
    ]
    assert "abc1234" in gpu_stamp.note(stamp_of(FILES), now)
    assert gpu_stamp.in_the_way_of_a_release(stamp_of(FILES), now) == told


def test_a_long_list_is_cut_and_counted():
    now = {f"ops/include/{n}.h": "5" * 16 for n in range(20)}
    text = gpu_stamp.note(stamp_of({}), now)
    assert text.count(": new") == gpu_stamp.SHOWN
    assert text.endswith("and 12 more")


@pytest.mark.parametrize(
    ("results", "why"),
    [
        (
            {"failed": 1, "names_failed": ("tests/gpu/x.py::y",)},
            "tests/gpu/x.py::y failed on the GPU",
        ),
        ({"failed": 2}, "2 tests failed on the GPU"),
        ({"passed": 0, "skipped": 9}, "no test passed on the GPU"),
        ({"whole": False}, "a part of the GPU suite was left out"),
    ],
)
def test_what_did_not_pass_is_in_the_way_of_a_release(results, why):
    assert gpu_stamp.in_the_way_of_a_release(stamp_of(FILES, **results), FILES) == [why]


def test_runs_of_the_same_code_on_two_gpus_of_a_kind_must_say_the_same():
    one = stamp_of(FILES)
    assert gpu_stamp.unlike(one, one) == []
    other = dataclasses.replace(one, digests={"tiny": "0" * 64, "new": "1" * 64})
    assert gpu_stamp.unlike(one, other) == ["tiny"]
    assert gpu_stamp.unlike(one, dataclasses.replace(other, machine={"gpu": "H100"})) == []
    assert gpu_stamp.unlike(one, dataclasses.replace(other, content="2" * 64)) == []


def test_no_stamp_is_a_note_and_in_the_way_of_a_release():
    assert gpu_stamp.note(None, FILES)
    (line,) = gpu_stamp.in_the_way_of_a_release(None, FILES)
    assert "make gpu-test" in line


def test_a_stamp_is_read_as_it_was_written(tmp_path: Path):
    stamp = stamp_of(FILES, failed=1, names_failed=("a", "b"))
    gpu_stamp.write(stamp, tmp_path / "new" / "stamp.json")
    assert gpu_stamp.read(tmp_path / "new" / "stamp.json") == stamp
    assert gpu_stamp.read(tmp_path / "none.json") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": 3}', '{"results": {}}'])
def test_what_is_no_stamp_is_refused_by_its_name(tmp_path: Path, text: str):
    path = tmp_path / "stamp.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"stamp\.json is no stamp"):
        gpu_stamp.read(path)


def test_kernels_and_device_code_are_watched_and_the_cpus_is_not(tmp_path: Path):
    watched = {
        "ops/csrc/cuda/deep/x.cu",
        "ops/include/baton_ops/y.cuh",
        "ops/cmake/cuda.cmake",
        "ops/src/baton_ops/cuda.py",
        "worker/src/baton_worker/engine/backends/device/runner.py",
        "worker/src/baton_worker/engine/backends/torch/device.py",
        "worker/src/baton_worker/engine/backends/kernels.py",
    }
    others = {
        "ops/include/baton_ops/cpu/z.h",
        "ops/csrc/cpu/z.cc",
        "ops/csrc/cuda/notes.md",
        "worker/src/baton_worker/engine/backends/paddle/decoder.py",
    }
    for name in watched | others:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert set(gpu_stamp.hashes(tmp_path)) == watched


def test_what_is_watched_is_there():
    found = gpu_stamp.hashes()
    assert {"ops/csrc/cuda/logprobs.cu", "ops/include/baton_ops/plan.cuh"} <= set(found)


@given(st.dictionaries(st.text(max_size=8), st.text("0123456789abcdef", min_size=16, max_size=16)))
def test_the_one_hash_depends_on_names_and_contents_and_not_on_the_order(files):
    assert gpu_stamp.content_of(files) == gpu_stamp.content_of(dict(reversed(files.items())))
    changed = files | {"a file that is new": "0" * 16}
    assert gpu_stamp.content_of(changed) != gpu_stamp.content_of(files)


def test_the_committed_stamp_can_be_read():
    stamp = gpu_stamp.read()
    if stamp is not None:
        assert stamp.content == gpu_stamp.content_of(stamp.files)
        assert dataclasses.asdict(stamp.results)["passed"] > 0


@pytest.mark.parametrize("part", ["files", "digests", "machine", "commit"])
def test_a_stamp_with_a_part_of_another_kind_is_refused_by_its_name(
    tmp_path: Path, part: str
) -> None:
    kept = json.loads(gpu_stamp.STAMP.read_text())
    path = tmp_path / "stamp.json"
    path.write_text(json.dumps(kept | {part: [1]}))
    with pytest.raises(ValueError, match=rf"stamp\.json is no stamp.*{part}"):
        gpu_stamp.read(path)


def test_a_release_is_refused_for_a_stamp_that_is_none(monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "stamp.json"
    path.write_text("{")
    monkeypatch.setattr(gpu_stamp, "read", lambda read=gpu_stamp.read: read(path))
    monkeypatch.setattr("sys.argv", ["gpu_stamp.py", "--release"])
    with pytest.raises(SystemExit, match="is no stamp"):
        gpu_stamp.main()
