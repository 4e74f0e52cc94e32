"""Control payloads: what gateways and workers say to each other besides step records.

Owns the msgpack-encoded bodies that ride behind the common 32-byte prefix (HELLO, WELCOME, SUBMIT,
RESERVE) and behind the KV transport (HandoffState). Fields are added at the end with defaults and
never reordered or reused. Knows nothing of sockets, sequence numbers or the engine.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton_worker.identity import RequestKey
from baton_worker.sampling import REQUEST_FEATURES, RequestParams

MAX_TOP_K = 64
"""Most top-k logprobs per token that the record can carry (its width byte allows 1 + 64)."""

HANDOFF_PLACES = "handoff_places"
"""Feature of a decode worker that answers asks for a place; an older one cannot read them."""
HANDOFF_NIXL = "handoff_nixl"
"""Feature of a decode worker that reads prefill workers' KV by NIXL."""
HANDOFF_NIXL_RANKS = "handoff_nixl_ranks"
"""Feature of one that reads it out of the parts of several ranks, too; an older one cannot."""
HANDOFF_LAYERS = "handoff_layers"
"""Feature of one that is told of the first layers of blocks; an older one knows whole ones."""
DECODE_PROMPTS = "decode_prompts"
"""Feature of a decode worker that is told to compute prompts too: a `Submit` without a target."""
FEATURES = (*REQUEST_FEATURES, HANDOFF_PLACES, HANDOFF_LAYERS)
"""What this version's workers can do beyond the first version's."""


Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253, pattern=r"^[!-~]+$")]
"""Printable ASCII without blanks: it stands in logs, metrics and lists."""
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]
Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Word64 = Annotated[int, msgspec.Meta(ge=0)]
"""64 bits: msgpack has no larger number."""
Span = Annotated[float, msgspec.Meta(gt=0, le=1e12)]


class GatewayInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a gateway says of itself in WELCOME's body; an older one says nothing.

    Attributes:
        instance: 128 random bits in hex that tell this process from every other.
    """

    instance: Text = ""


class WorkerInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker says of itself in HELLO, and again whenever `draining` changes.

    Attributes:
        worker_id: stable name (pod name, or `decode-0` under `local`); a new process under the
            same name replaces the old one.
        role: `identity.Role` value.
        wire_min, wire_max: record layout majors it can write.
        semantic_hash: see `identity.semantic_hash`; a gateway pairs only equal ones.
        config_hash: hash of the options that P and D must share (K, block size, dtype, KV layout).
        revision: rollout revision the operator gave it, or "".
        model: served model name.
        vocab_size, max_model_len, max_top_k: limits a gateway checks before it submits.
        max_running: requests it steps at once; `max_waiting`: requests it queues beyond that.
        kv_capacity_tokens: tokens its KV pool holds.
        kv_endpoint: where prefill workers send KV ("" for a worker that takes none).
        kv_public_key: Z85 CURVE key of that endpoint, or "" when CURVE is off.
        metrics_url: where its /metrics is.
        draining: no new requests, please.
        tokenizer_hash: of tokenizer.json; a gateway with another one turns this worker away,
            because its text would be wrong. "" (no tokenizer here) is taken on trust.
        features: names of what requests may ask of it that not every version can do.
        model_fingerprint: hash of its weights and shapes, as in `HandoffState`; a gateway pairs
            only equal ones. "" (a version that does not say) pairs within its revision only.
        kv_door: name of the socket in `handoff.shared_dir` where prefill workers of the same host
            make their KV pools known, or "".
        pair_group: workers of a group (a pod with both roles) pair with each other alone; those of
            "" are one.
        chat_template_hash: of what turns a chat into text; a gateway with another template uses
            this worker only where no pair has its own. "" (none here) is taken on trust.
    """

    worker_id: Name
    role: Byte
    wire_min: Byte
    wire_max: Byte
    semantic_hash: Word64
    config_hash: Text
    revision: Text
    model: Text
    vocab_size: Positive
    max_model_len: Positive
    max_top_k: Amount
    max_running: Positive
    max_waiting: Amount
    kv_capacity_tokens: Amount
    kv_endpoint: Text = ""
    kv_public_key: Text = ""
    metrics_url: Text = ""
    pid: Amount = 0
    draining: bool = False
    tokenizer_hash: Text = ""
    features: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)] = ()
    model_fingerprint: Text = ""
    chat_template_hash: Text = ""
    kv_door: Text = ""
    pair_group: Text = ""


class DecodeTarget(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a prefill worker hands a request over to; the rest is as in its `WorkerInfo`."""

    worker_id: Name
    kv_endpoint: Text
    kv_public_key: Text = ""
    features: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)] = ()
    kv_door: Text = ""


class Submit(RequestParams, frozen=True, omit_defaults=True, tag="submit"):
    """Run this prompt: all of it, or up to the first token and hand over (`decode` set).

    Attributes:
        handle, attempt: the request (`identity.RequestKey`).
        decode: None for a mixed worker, and for a decode worker of the feature DECODE_PROMPTS.
        gateway_sent_unix_ns: for the queue-time metric only, never for logic.
        turn: the request's place among all that this gateway process gave out, from 1; it stays
            with later attempts. Lines that it stands in keep this order. 0: an older gateway's.
    """

    handle: Word64
    attempt: Byte
    decode: DecodeTarget | None = None
    gateway_sent_unix_ns: int = 0
    turn: Amount = 0

    @property
    def key(self) -> RequestKey:
        """The request's attempt."""
        return RequestKey(self.handle, self.attempt)


class Reserve(msgspec.Struct, frozen=True, omit_defaults=True, tag="reserve"):
    """Expect a handoff for this request: hold a place until it comes or `deadline_seconds` pass."""

    handle: Word64
    attempt: Byte
    prompt_tokens: Amount
    max_tokens: Amount
    deadline_seconds: Span
    traceparent: Text = ""


class Abort(msgspec.Struct, frozen=True, omit_defaults=True, tag="abort"):
    """Stop this request and free what it holds; unknown or finished ones are ignored.

    `attempt` and all earlier attempts are meant. The worker answers a request it still held with a
    terminal row (Finish.ABORT).
    """

    handle: Word64
    attempt: Byte


Command = Submit | Reserve | Abort


class DraftScores(msgspec.Struct, frozen=True, omit_defaults=True):
    """The draft model's logprobs of the first drafts of a proposal; none of those looked up.

    One logprob and rank per draft, and `logprobs_k` alternatives each, by draft.
    """

    logprobs: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    topk_tokens: tuple[int, ...] = ()
    topk_logprobs: tuple[float, ...] = ()


NO_DRAFT_SCORES = DraftScores()


class HandoffState(RequestParams, frozen=True, omit_defaults=False):
    """All that decode needs besides the KV blocks to continue exactly where prefill stopped.

    Written with its defaults: the version before takes some of them (`logprobs_k`) for required.

    KV frames follow in layer order, K then V, MTP layers last: 2 * n_layers arrays of
    `[ceil(n_cached / block_size), kv_heads, block_size, head_dim]`, dtype `dtype`, unused tail of
    the last block zeroed. Where `dtype` ends in "-by-block" they are one array
    `[blocks, n_layers, 2, kv_heads, block_size, head_dim]` instead. Where "-compressed" stands
    behind the name of the numbers, one array or part is in place of K and V.

    Attributes:
        model_fingerprint: hash of the weights' identity and shapes; decode refuses another.
        n_cached: positions whose KV is present in every layer: the prompt's, and those of
            output_token_ids.
        first_token, first_logprob, first_rank, topk_*: t0, which stands behind output_token_ids,
            and its logprob columns, so that decode can echo it (`width` as in the record: 0 none,
            1 sampled, 1 + k).
        drafts: every draft token that prefill proposed after t0, 0..5.
        draft_scores: their logprobs, for a request that wants to see them.
        n_reused: prompt tokens whose KV prefill did not have to compute.
    """

    handle: int
    attempt: int
    model_fingerprint: str
    dtype: str
    n_layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    n_cached: int
    first_token: int
    width: int = 0
    first_logprob: float = 0.0
    first_rank: int = 0
    topk_tokens: tuple[int, ...] = ()
    topk_logprobs: tuple[float, ...] = ()
    drafts: tuple[int, ...] = ()
    draft_scores: DraftScores = NO_DRAFT_SCORES
    n_reused: int = 0

    @property
    def key(self) -> RequestKey:
        """The request's attempt."""
        return RequestKey(self.handle, self.attempt)
