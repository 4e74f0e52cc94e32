"""What may be asked of baton_ops does not change under one number of its interface."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from baton_ops.interface import INTERFACE

OPS = Path(__file__).resolve().parents[2] / "ops"
KNOWN = (3, "1d32bf892c3c3dca")
"""The number, and the digest of what it stands for."""

_EXPORT = re.compile(r"^(?:BATON_EXPORT\w*|TVM_FFI_DLL_EXPORT_TYPED_FUNC)\([^)]*\)", re.MULTILINE)
_COUNT = re.compile(r"constexpr int32_t k\w+Arguments = \d+;")


def python_contracts() -> Iterator[str]:
    """Yield name, parameters and docstring of all that callers may use, shapes among them."""
    for path in sorted((OPS / "src" / "baton_ops").glob("*.py")):
        if path.stem.startswith("_") or path.stem in {"interface", "oracle"}:
            continue
        tree = ast.parse(path.read_text())
        yield f"{path.stem}: {ast.get_docstring(tree)}"
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield f"{node.name}: {ast.get_docstring(node)}"
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                returned = ast.unparse(node.returns) if node.returns else None
                yield f"{ast.unparse(node.args)} -> {returned}"
            if isinstance(node, ast.ClassDef):
                fields = (ast.Assign, ast.AnnAssign)
                yield from (ast.unparse(part) for part in node.body if isinstance(part, fields))
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                yield from (f"{part.name}: {ast.unparse(part.args)}" for part in methods)
            if isinstance(node, ast.Assign | ast.AnnAssign):
                yield ast.unparse(node)


def native_contracts() -> Iterator[str]:
    """Yield each exported function with the number of its arguments."""
    sources = "\n".join(
        path.read_text()
        for path in sorted((OPS / "csrc").rglob("*"))
        if path.suffix in {".cc", ".h"}
    )
    yield from sorted(re.sub(r"\s+", " ", found) for found in _EXPORT.findall(sources))
    yield from sorted(_COUNT.findall(sources))


def test_contracts_that_changed_have_a_number_of_their_own() -> None:
    """No fingerprint can tell a comma from another meaning, so a person says which it was."""
    contracts = [*python_contracts(), *native_contracts()]
    assert len(contracts) > 150
    digest = hashlib.sha256("\n".join(contracts).encode()).hexdigest()[:16]
    assert (INTERFACE, digest) == KNOWN, (
        "what baton_ops takes, gives or says of itself changed. Where a library of before would "
        "refuse or do otherwise than is said now, raise INTERFACE (ops/src/baton_ops/interface.py, "
        "kInterface in ops/csrc/export.cc, NEEDED in worker/src/baton_worker/ops_interface.py); "
        "then write number and digest to KNOWN"
    )


def test_the_three_places_say_one_number() -> None:
    source = (OPS / "csrc" / "export.cc").read_text()
    assert f"constexpr int64_t kInterface = {INTERFACE};" in source
    worker = OPS.parent / "worker" / "src" / "baton_worker" / "ops_interface.py"
    assert f"\nNEEDED = {INTERFACE}\n" in worker.read_text()
