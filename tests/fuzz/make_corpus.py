"""Write the seed corpus: the golden vectors and a few frames of other shapes."""

from __future__ import annotations

import runpy
import struct
import zlib
from pathlib import Path

import numpy as np

from baton_fuzz.record_mutations import CORPUS
from baton_worker.records.columns import Finish, StepColumns
from baton_worker.records.encode import encode_step
from baton_worker.records.scored import ScoredRow, ScoredTokens

GOLDEN = Path(__file__).parent.parent / "records" / "golden" / "make_vectors.py"


def wide(n_rows: int, k: int) -> StepColumns:
    """Rows of three tokens with k alternatives each."""
    tokens, rng = 3 * n_rows, np.random.default_rng(zlib.crc32(struct.pack("<II", n_rows, k)))
    return StepColumns(
        handle=np.arange(n_rows, dtype=np.uint64),
        position=np.arange(n_rows, dtype=np.uint32),
        n_tokens=np.full(n_rows, 3, np.uint8),
        width=np.full(n_rows, k + 1, np.uint8),
        flags=np.full(n_rows, Finish.LENGTH, np.uint8),
        attempt=np.zeros(n_rows, np.uint8),
        token=rng.integers(0, 512, tokens, np.int32),
        logprob=-rng.random(tokens, np.float32),
        rank=rng.integers(1, 512, tokens, np.int32),
        topk_token=rng.integers(0, 512, tokens * k, np.int32),
        topk_logprob=-rng.random(tokens * k, np.float32),
        n_proposed=np.full(n_rows, 5, np.uint8),
        n_accepted=np.full(n_rows, 2, np.uint8),
        verified_drafts=ScoredTokens.of(
            [ScoredRow(0, [3] * 5, 2, [-1.0], [1], [4], [-2.0])] * n_rows
        ),
        prompt_tokens=ScoredTokens.of(
            [ScoredRow(1, [3] * 9, 1, [-1.0] * 9, [2] * 9, [], [])] * n_rows
        ),
    )


def main() -> None:
    """Write one file per seed."""
    golden = runpy.run_path(str(GOLDEN))
    frames: dict[str, bytes] = dict(golden["read"]())
    frames["step_wide"] = encode_step(wide(4, 5), golden["HEADER"])
    frames["step_tall"] = encode_step(wide(64, 0), golden["HEADER"])
    CORPUS.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        (CORPUS / f"{name}.bin").write_bytes(frame)


if __name__ == "__main__":
    main()
