"""Run the tiny model with prefill and decode in separate processes and show one chat completion.

Prints each token as it streams, with its logprob, its rank among the alternatives and where prefill
handed over to decode; then a table. Every logprob is checked against a float64 forward of the whole
sequence. Exits 0 only if all of that was real: tokens came, prefill computed the first, decode the
rest, drafts were verified, and the numbers agree.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from baton_testing.numpy_reference import forward
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.model.weights import load_weights

MODEL = Path(__file__).resolve().parent / "tiny-mtp"
REFERENCE_MESSAGE_BYTES = 530_444
TOLERANCE = 5e-5
READY_SECONDS = 60.0
PROMPT = "What does the license say about copies of the work?"


@dataclass(frozen=True)
class Process:
    """One process of the deployment, as `local --json` announced it."""

    role: str
    pid: int
    metrics_url: str


@dataclass
class Stream:
    """What the client received."""

    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    usage: dict[str, int] = field(default_factory=dict)


def say(text: str = "") -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def deployment(port: int) -> Iterator[tuple[list[Process], subprocess.Popen[str]]]:
    """Run `baton-worker local` and yield its processes once a pair is usable."""
    command = [sys.executable, "-m", "baton_worker.main", "--log-level", "warning", "local"]
    command += ["--model", str(MODEL), "--port", str(port), "-k", "2", "--json"]
    say(f"[demo] starting gateway, prefill and decode: {' '.join(command[1:])}")
    local = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield wait_ready(local, port), local
    finally:
        local.send_signal(signal.SIGTERM)
        local.wait(timeout=15)


def wait_ready(local: subprocess.Popen[str], port: int) -> list[Process]:
    """Read the three readiness lines, then wait until /readyz says that a pair is usable."""
    assert local.stdout is not None
    started = time.monotonic()
    processes: list[Process] = []
    while len(processes) < 3:
        line = local.stdout.readline()
        if not line:
            raise SystemExit(
                "[demo] the deployment ended before it was ready; the reason is above "
                "(for another port: BATON_DEMO_PORT=PORT make demo)"
            )
        facts = json.loads(line)
        processes.append(Process(facts["role"], facts["pid"], facts["metrics_url"]))
        say(f"[demo] {facts['role']:<8} pid {facts['pid']:<7} {facts['metrics_url']}")
    while not is_ready(port):
        if time.monotonic() - started > READY_SECONDS:
            raise SystemExit(f"[demo] no usable pair after {READY_SECONDS:.0f} s")
        time.sleep(0.05)
    say(f"[demo] ready after {time.monotonic() - started:.1f} s\n")
    return processes


def is_ready(port: int) -> bool:
    """Ask the gateway's /readyz."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def chat(port: int, max_tokens: int) -> Stream:
    """Stream one chat completion through the official client and print it token by token."""
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    stream = Stream()
    started = time.monotonic()
    say(f"user: {PROMPT}\n")
    say("   #  token            logprob  rank  computed by")
    chunks = client.chat.completions.create(
        model=MODEL.name,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=max_tokens,
        temperature=0.8,
        seed=7,
        logprobs=True,
        top_logprobs=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    for chunk in chunks:
        if chunk.usage is not None:
            stream.usage = flatten_usage(chunk.usage)
        for choice in chunk.choices:
            take_choice(stream, chunk, choice, time.monotonic() - started)
    stream.seconds = time.monotonic() - started
    return stream


def take_choice(stream: Stream, chunk: object, choice: object, elapsed: float) -> None:
    """Add one chunk's tokens to the stream and print them."""
    extra = getattr(chunk, "model_extra", None) or {}
    stream.prompt_ids = stream.prompt_ids or list(extra.get("prompt_token_ids") or [])
    ids = list((getattr(choice, "model_extra", None) or {}).get("token_ids") or [])
    stream.token_ids += ids
    stream.finish_reason = getattr(choice, "finish_reason", None) or stream.finish_reason
    logprobs = getattr(choice, "logprobs", None)
    for entry in (logprobs.content or []) if logprobs else []:
        if not stream.logprobs:
            stream.first_token_seconds = elapsed
        print_token(len(stream.logprobs), entry)
        stream.logprobs.append(entry.logprob)


def print_token(position: int, entry: object) -> None:
    """Print one token's line; after the first, where the baton changed hands."""
    token, logprob = getattr(entry, "token", ""), getattr(entry, "logprob", 0.0)
    better = sum(top.logprob > logprob for top in getattr(entry, "top_logprobs", []))
    rank = str(better + 1) if better < 3 else ">3"
    who = "prefill" if position == 0 else "decode"
    say(f"{position:>4}  {token!r:<16} {logprob:>8.4f}  {rank:>4}  {who}")
    if position == 0:
        say("      ------------------------------- handover: KV cache, first token, drafts")


def flatten_usage(usage: object) -> dict[str, int]:
    """Return the counts that the table shows."""
    details = getattr(usage, "completion_tokens_details", None)
    return {
        "prompt": getattr(usage, "prompt_tokens", 0),
        "completion": getattr(usage, "completion_tokens", 0),
        "accepted": getattr(details, "accepted_prediction_tokens", 0) or 0,
        "rejected": getattr(details, "rejected_prediction_tokens", 0) or 0,
    }


class Scrape:
    """One process's metrics at one moment."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(url, timeout=5) as reply:
            text = reply.read().decode()
        self._samples = [s for f in text_string_to_metric_families(text) for s in f.samples]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of this name with these labels."""
        wanted = labels.items()
        return sum(s.value for s in self._samples if s.name == name and wanted <= s.labels.items())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return samples of this name keyed by one label."""
        return {s.labels[label]: s.value for s in self._samples if s.name == name}

    def mean_ms(self, histogram: str) -> float:
        """Return a histogram's mean in milliseconds; NaN when it saw nothing."""
        count = self.value(f"{histogram}_count")
        return 1e3 * self.value(f"{histogram}_sum") / count if count else math.nan


def largest_error(shape: ModelShape, stream: Stream) -> float:
    """Return max |streamed logprob - float64 log-softmax of the full forward| over all tokens."""
    weights = load_weights(MODEL, shape)
    sequence = [*stream.prompt_ids, *stream.token_ids]
    logits = forward(weights, shape, sequence[:-1]).logits[len(stream.prompt_ids) - 1 :]
    shifted = logits - logits.max(axis=1, keepdims=True)
    reference = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    want = reference[np.arange(len(stream.token_ids)), stream.token_ids]
    return float(np.abs(want - np.array(stream.logprobs)).max())


def report(stream: Stream, scrapes: dict[str, Scrape], error: float) -> list[str]:
    """Print the table and return what was not as it must be."""
    prefill, decode = scrapes["prefill"], scrapes["decode"]
    proposed = decode.by_label("baton_draft_proposed_tokens_total", "position")
    accepted = decode.by_label("baton_draft_accepted_tokens_total", "position")
    rates = [f"{accepted.get(p, 0) / n:.2f} of {n:.0f}" for p, n in sorted(proposed.items()) if n]
    steps = decode.value("baton_accept_length_tokens_count")
    length = decode.value("baton_accept_length_tokens_sum") / steps if steps else math.nan
    frames = sum(s.value("baton_link_sent_frames_total") for s in (prefill, decode))
    sent = sum(s.value("baton_link_sent_bytes_total") for s in (prefill, decode))
    per_record = sent / frames if frames else math.nan
    split = {
        "queue": prefill.mean_ms("baton_engine_queue_seconds"),
        "prefill": prefill.mean_ms("baton_engine_prefill_seconds"),
        "KV transfer": prefill.mean_ms("baton_handoff_transfer_seconds"),
        "KV import": prefill.mean_ms("baton_handoff_import_seconds"),
        "first decode rows": decode.mean_ms("baton_first_emit_seconds"),
    }
    say(f"\nfinish: {stream.finish_reason}\n")
    rows = [
        ("prompt / output tokens", f"{stream.usage['prompt']} / {stream.usage['completion']}"),
        ("logprobs received", str(len(stream.logprobs))),
        ("largest |error| vs float64", f"{error:.1e}  (limit {TOLERANCE:.0e})"),
        ("MTP acceptance by position", ", ".join(rates)),
        ("tokens per decode step", f"{length:.2f} over {steps:.0f} steps"),
        ("drafts accepted / rejected", f"{stream.usage['accepted']} / {stream.usage['rejected']}"),
        ("first token at the client", f"{1e3 * stream.first_token_seconds:.1f} ms"),
        ("  split", ", ".join(f"{name} {ms:.1f} ms" for name, ms in split.items())),
        ("whole answer", f"{1e3 * stream.seconds:.1f} ms"),
        ("KV handed over", f"{prefill.value('baton_handoff_sent_bytes_total') / 1024:.1f} KiB"),
        ("bytes per record", f"{per_record:.0f}  (fixed message: {REFERENCE_MESSAGE_BYTES})"),
    ]
    for name, value in rows:
        say(f"  {name:<28} {value}")
    outcomes = prefill.by_label("baton_handoff_outcomes_total", "outcome")
    # The end of the answer may reach prefill before decode's word that the KV is there does.
    handed_over = outcomes.get("delivered", 0) + outcomes.get("cancelled", 0)
    return failures(stream, error, {"handoffs": handed_over, "decode steps": steps})


def failures(stream: Stream, error: float, counts: dict[str, float]) -> list[str]:
    """Return each claim of this demo that did not hold."""
    claims = {
        "more than one token came": len(stream.token_ids) > 1,
        "every token has a logprob": len(stream.logprobs) == len(stream.token_ids),
        "usage counts those tokens": stream.usage.get("completion") == len(stream.token_ids),
        "logprobs equal the full forward's": error <= TOLERANCE,
        "prefill handed over exactly once": counts["handoffs"] == 1,
        "decode verified drafts": counts["decode steps"] > 0,
        "drafts were accepted": stream.usage.get("accepted", 0) > 0,
    }
    return [claim for claim, held in claims.items() if not held]


def main() -> int:
    """Run the demo; return 0 only if every claim held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=int(os.environ.get("BATON_DEMO_PORT", "8000")))
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--keep", action="store_true", help="leave it serving until Ctrl-C")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what it started
    with deployment(options.port) as (processes, local):
        stream = chat(options.port, options.max_tokens)
        scrapes = {p.role: Scrape(p.metrics_url) for p in processes}
        error = largest_error(load_shape(MODEL), stream)
        missing = report(stream, scrapes, error)
        if options.keep and not missing:
            serve(options.port, local)
    for claim in missing:
        say(f"[demo] FAILED: {claim}")
    say("[demo] everything above was computed, handed over and checked" if not missing else "")
    return 1 if missing else 0


def serve(port: int, local: subprocess.Popen[str]) -> None:
    """Print how to call it and wait for Ctrl-C."""
    body = json.dumps(
        {
            "model": MODEL.name,
            "messages": [{"role": "user", "content": PROMPT}],
            "logprobs": True,
            "top_logprobs": 3,
            "max_tokens": 40,
        }
    )
    say("\n[demo] serving until Ctrl-C; try:\n")
    say(f"curl http://127.0.0.1:{port}/v1/chat/completions -H 'content-type: application/json' \\")
    say(f"  -d '{body}'\n")
    try:
        local.wait()
    except KeyboardInterrupt:
        say("\n[demo] stopping")


if __name__ == "__main__":
    sys.exit(main())
