"""The sections of the GPU engine's page that tell of requests served: loop, baseline, gateway."""

from __future__ import annotations

from page_text import Goal, Record, Run, share, table

IDLE, GATEWAY = 0.03, 0.95
STAND_IN = "flash_torch"
HINT = """It gathers keys and values before each attention, as transformers does for a kernel that
reads no block table: flash-attn's own package, which reads one, was not installed."""


def phases(run: Run) -> str:
    """The engine's own loop."""
    found = [one for one in run.record.get("phases") or () if "error" not in one]
    if not found:
        return ""
    rows = []
    for one in found:
        logprobs = "no" if one["top"] < 0 else f"k = {one['top']}"
        idle = share(one["idle_share"])
        if one["overlap"]:
            what = f"{one['rows']} requests, K = {one['k']}, logprobs: {logprobs}"
            name, value = f"the GPU's idle share, {what}", one["idle_share"]
            goal = Goal(name, "idle", value, IDLE, "share", least=False)
            idle += f" ({run.held(goal)})"
        rows.append([one["rows"], one["k"], logprobs, "on" if one["overlap"] else "off",
                     f"{one['tokens_per_s']:,.0f}", f"{one['step_ms']:.2f}", idle])  # fmt: skip
    head = ["requests", "K", "logprobs", "overlap", "tokens/s", "step, ms", "GPU idle (goal)"]
    return f"""## The engine's loop

Sampled requests with a prompt of 256 tokens, all decoding, the engine stepping by itself. Idle is
the time of a trace that no kernel or copy covers. Random weights draft nothing that is accepted: K
above 0 tells what drafts cost, not what they bring.

{table(head, rows)}"""


def transformers(run: Run) -> str:
    """The same requests, served by transformers' continuous batching."""
    record = run.record.get("transformers") or {}
    found = [one for one in record.get("phases", ()) if "error" not in one]
    if not found:
        return ""
    rows = []
    for one in found:
        ours = _ours(run, one["rows"])
        speed = one["tokens_per_s"]
        rows.append([one["rows"], one["attention"], "yes" if one["cuda_graphs"] else "no",
                     f"{speed:,.0f}", f"{one['step_ms']:.2f}",
                     f"{ours / speed:.2f}" if ours else "-"])  # fmt: skip
    head = ["requests", "attention", "CUDA graphs", "tokens/s", "step, ms", "ours / theirs"]
    names = {one["attention"] for one in found}
    hint = f" `{STAND_IN}` is its flash attention with PyTorch's kernels. {HINT}"
    return f"""## The same requests, served by transformers

Continuous batching of transformers {record["version"]}, bf16, the same shape and the same phase:
60 steps of a full batch, sampled, without logprobs and drafts. `sdpa` and `eager` attend to all
that is cached, under a mask.{hint if STAND_IN in names else ""}

{table(head, rows)}"""


def _ours(run: Run, rows: int) -> float | None:
    """Return the loop's tokens a second without drafts: without logprobs if that was measured."""
    found = [
        one
        for one in run.record.get("phases") or ()
        if "error" not in one and (one["rows"], one["k"], one["overlap"]) == (rows, 0, True)
    ]
    return min(found, key=lambda one: int(one["top"]))["tokens_per_s"] if found else None


def gateway(run: Run) -> str:
    """What of the engine's tokens reaches clients."""
    if not run.gateways:
        return ""
    rows = [_gateway_row(run, record, one) for record in run.gateways for one in record["summary"]]
    head = ["model", "streams", "K", "logprobs", "rounds", "engine alone, tokens/s",
            "through the gateway", "ratio (least to most)", "goal"]  # fmt: skip
    return f"""## Through the gateway

The same requests to an engine alone in a process, and as SSE streams with logprobs through a
gateway to clients, in turns (`tests/gpu/bench_gateway.py`); the phase in which all streams run.

{table(head, rows)}"""


def _gateway_row(run: Run, record: Record, one: Record) -> list[object]:
    name = f"tokens that reach clients, {record['model']}, logprobs k = {one['logprobs']}"
    goal = Goal(name, "gateway", one["ratio"], GATEWAY, "share", least=True)
    spread = f"{share(min(one['ratios']))} to {share(max(one['ratios']))}"
    return [
        record["model"], record["load"]["streams"], record["drafts"], f"k = {one['logprobs']}",
        one["rounds"], f"{one['engine']:,.0f}", f"{one['gateway']:,.0f}",
        f"{share(one['ratio'])} ({spread})", run.held(goal),
    ]  # fmt: skip
