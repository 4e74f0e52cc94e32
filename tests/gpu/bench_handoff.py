"""What handing over costs one request: when its first and second token come, pair against mixed.

    python3 tools/gpu.py run tests/gpu/bench_handoff.py [--rounds N] [--json FILE]

Three deployments stand side by side: one mixed worker on GPU 0, a pair on GPUs 0 and 1 whose KV is
sent (zmq), and such a pair whose decode reads it (nvlink). They take turns, one request at a time
with a prompt that no round had before, through HTTP and SSE, so the times are those of an idle
deployment. The first token comes from prefill: what a pair adds to it is asking for a place. The
second waits for the KV. `--engine cpu` tries all of it without a GPU (shm in place of nvlink).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import numpy as np  # noqa: E402
from bench_gateway import BLOCK_SIZE, Load, model_folder, say  # noqa: E402

import gpu  # noqa: E402
from baton_testing.local_deployment import Deployment, start  # noqa: E402
from baton_worker.engine.model.shape import load_shape  # noqa: E402

TOKENS = 24
"""Out of each request: a few steps behind the second."""
FIRST_TEXT_ID = 6
PATIENCE_SECONDS = 60.0


class Times:
    """When a request's events came, in seconds from its first byte out."""

    def __init__(self, port: int, body: bytes) -> None:
        self.events: list[float] = []
        with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            began = time.perf_counter()
            connection.sendall(head.encode() + body)
            rest = b""
            while b"data: [DONE]" not in rest:
                data = connection.recv(1 << 16)
                if not data or b'"error"' in data:
                    raise ValueError(f"the request failed: {(rest + data)[-400:]!r}")
                now = time.perf_counter() - began
                rest += data
                self.events += [now] * (rest.count(b'"token_logprobs":[') - len(self.events))


def deployments(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """Return the flags of each way to serve."""
    shared = [
        *("--model", str(folder), "--engine", options.engine, "-k", "0", "--max-running", "8"),
        *("--kv-blocks", str(3 * (max(options.prompts) + TOKENS) // BLOCK_SIZE + 64)),
        *("--prefill-chunk", "8192"),
    ]
    gpus = ["--gpus", "0,1"] if options.engine == "gpu" else []
    return {
        "mixed": [*shared, "--prefill", "0", "--decode", "0", "--mixed", "1", *gpus],
        "sent": [*shared, *gpus],
        "read": [*shared, *gpus, "--share-kv"],
    }


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Serve in turns; yield a record for each request."""
    with model_folder(options) as folder, contextlib.ExitStack() as stack:
        served = {
            name: stack.enter_context(start(*flags))
            for name, flags in deployments(options, folder).items()
        }
        vocab_size = load_shape(folder).vocab_size
        until = time.monotonic() + options.seconds
        for number in range(-1, options.rounds):
            for length in options.prompts:
                if time.monotonic() > until:
                    say("no time is left for more rounds")
                    return
                for turn, name in enumerate(served):
                    seed = (number + 2) * 1000 + turn
                    record = one(served[name], name, length, vocab_size, seed)
                    if number >= 0:  # the first round warms
                        yield record
        for name, deployment in served.items():
            say(f"{name}: KV by transport {ways(deployment, name)}")


def one(deployment: Deployment, name: str, length: int, vocab: int, seed: int) -> dict[str, Any]:
    """Ask once."""
    prompt = np.random.default_rng(seed).integers(FIRST_TEXT_ID, vocab, length).tolist()
    body = {"prompt": prompt, "max_tokens": TOKENS, "stream": True, "logprobs": 0}
    body |= {"ignore_eos": True, "temperature": 0, "model": json_model(deployment)}
    times = Times(int(deployment.url.rpartition(":")[2]), json.dumps(body).encode())
    return {"way": name, "prompt": length, "first": times.events[0], "second": times.events[1]}


def json_model(deployment: Deployment) -> str:
    """Return the name that it serves under."""
    import httpx

    listed = httpx.get(f"{deployment.url}/v1/models", timeout=PATIENCE_SECONDS).json()
    return str(listed["data"][0]["id"])


def ways(deployment: Deployment, name: str) -> dict[str, float]:
    """Return bytes of KV by the way they took."""
    if name == "mixed":
        return {}
    metric = "baton_handoff_delivered_bytes_total"
    names = ("zmq", "shm", "nvlink")
    return {way: deployment.metric("prefill", metric, transport=way) for way in names}


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return medians, and what a pair adds to a mixed worker, of requests in the same round."""
    found = []
    for length in sorted({r["prompt"] for r in records}):
        of = {
            way: [r for r in records if r["prompt"] == length and r["way"] == way]
            for way in ("mixed", "sent", "read")
        }
        for way, some in of.items():
            told: dict[str, Any] = {"prompt": length, "way": way, "requests": len(some)}
            for key in ("first", "second"):
                pairs = zip(some, of["mixed"], strict=False)
                told[f"{key}_ms"] = 1e3 * statistics.median(r[key] for r in some)
                told[f"{key}_added_ms"] = 1e3 * statistics.median(a[key] - b[key] for a, b in pairs)
            found.append(told)
    return found


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=["qwen3-8b", "tiny"], default="qwen3-8b")
    parser.add_argument("--engine", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--layers", type=int, default=36, help="of the random model")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=90, help="no round begins after them")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    options.load, options.drafts = Load(1, max(options.prompts), TOKENS, 0, 0), 0
    records = list(measured(options))
    for told in summary(records):
        say(
            f"{told['prompt']:6} tokens, {told['way']:5}: first {told['first_ms']:.2f} ms "
            f"({told['first_added_ms']:+.2f}), second {told['second_ms']:.2f} ms "
            f"({told['second_added_ms']:+.2f}), {told['requests']} requests"
        )
    if options.json:
        machine = gpu.machine() if options.engine == "gpu" else {"cores": str(os.cpu_count())}
        whole = {"machine": machine, "commit": gpu.commit(), "summary": summary(records)}
        options.json.write_text(json.dumps(whole | {"records": records}) + "\n")


if __name__ == "__main__":
    main()
