"""Bytes of the KV channel: how a handoff and its answer look on the wire.

An offer is a ZeroMQ multipart message: `[b"BKV1", HandoffState as msgpack, one frame per KV
array]`, arrays in layer order, K then V, MTP layers last, each C-contiguous in the state's dtype;
or, where the dtype's name ends in "-by-block", one array of whole blocks; with "-compressed" behind
the dtype there is one row in place of K and V (`engine.kv.payload`).
KV that stays in prefill's pool is told by its blocks:
`[b"BKP1", HandoffState, PoolRef as msgpack]`, and while the prompt is computed what is filled of
them by `[b"BKF1", Filled as msgpack]`, or of its last chunk layer by layer by
`[b"BKL1", FilledLayers as msgpack]`, which nobody answers.
An answer is `[b"BKV1", Answer as msgpack]`. Before it computes a prompt, prefill asks for a place:
`[b"BKA1", Ask as msgpack]`, or takes that back with a Withdrawal. Parsing trusts nothing: sizes
follow from the state, whose own numbers are capped first. Knows no sockets.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import BegunBlocks, Handoff, KvFilled, KvInPool, LeaseName
from baton_worker.engine.kv.payload import BY_BLOCK, COMPRESSED
from baton_worker.handoff.pool_words import POOL_ID_BYTES
from baton_worker.identity import RequestKey
from baton_worker.messages import MAX_TOP_K, HandoffState
from baton_worker.records.columns import ErrorCode

MAGIC = b"BKV1"
ASK_MAGIC = b"BKA1"
POOL_MAGIC = b"BKP1"
FILLED_MAGIC = b"BKF1"
LAYERS_MAGIC = b"BKL1"
_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
_KINDS = (*_DTYPES, *(dtype + COMPRESSED for dtype in _DTYPES))
_FORMS = (*_KINDS, *(kind + BY_BLOCK for kind in _KINDS))
_MAX_LAYERS = 1024
_MAX_HEADS = 1024
_MAX_HEAD_DIM = 4096
_MAX_BLOCK_SIZE = 1024
_MAX_CACHED_TOKENS = 1 << 24
_MAX_DRAFTS = 64
_MAX_KV_BYTES = 1 << 48
_MAX_TURN = 1 << 40
MAX_OFFER_FRAMES = 2 + 2 * _MAX_LAYERS
MAX_ANSWER_FRAMES = 2


class HandoffFormatError(ValueError):
    """A message on the KV channel is not what it must be; the text says where.

    `key`: the request of an offer that can be answered.
    """

    key: RequestKey | None = None


class AnswerKind(enum.IntEnum):
    """Of an offer: RECEIVED says that all of it is here; IMPORTED and REFUSED end it.

    Of an ask: QUEUED says that it was heard, GRANTED that the place is kept; REFUSED ends it.
    """

    RECEIVED = 1
    IMPORTED = 2
    REFUSED = 3
    GRANTED = 4
    QUEUED = 5


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Decode's word on an offer.

    `code` of a refusal: an ErrorCode, or 0, which older workers take for a plain refusal: the
    request was aborted, so that nobody failed.
    """

    handle: int
    attempt: int
    kind: int
    code: int = 0
    message: str = ""

    @property
    def key(self) -> RequestKey:
        """The offer that is answered."""
        return RequestKey(self.handle, self.attempt)

    @property
    def is_over(self) -> bool:
        """Whether it refuses what was aborted."""
        return self.kind == AnswerKind.REFUSED and not self.code

    @property
    def error(self) -> ErrorCode:
        """The refusal's code; a number we do not know counts as a plain refusal."""
        known = self.code in ErrorCode.__members__.values()
        return ErrorCode(self.code) if known else ErrorCode.HANDOFF_REFUSED


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A place at decode, please: for `kv_bytes` of KV that hold `n_tokens` positions.

    `turn`: as in `Submit`. An older decode worker reads no further than `priority`.
    """

    handle: int
    attempt: int
    kv_bytes: int
    n_tokens: int
    priority: int = 0
    turn: int = 0

    @property
    def key(self) -> RequestKey:
        """The request that needs the place."""
        return RequestKey(self.handle, self.attempt)


class Withdrawal(msgspec.Struct, frozen=True, array_like=True, tag="withdraw"):
    """The place is not needed any more."""

    handle: int
    attempt: int

    @property
    def key(self) -> RequestKey:
        """The request that had asked."""
        return RequestKey(self.handle, self.attempt)


class PoolRef(msgspec.Struct, frozen=True, array_like=True):
    """Where KV lies that does not travel: blocks of the pool that this name was given, as long as
    the lease holds (`engine.api.LeaseName`).
    """

    pool_id: Annotated[bytes, msgspec.Meta(min_length=POOL_ID_BYTES, max_length=POOL_ID_BYTES)]
    blocks: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)], ...],
        msgspec.Meta(max_length=_MAX_CACHED_TOKENS),
    ]
    lease_slot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
    lease_serial: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]


class Filled(msgspec.Struct, frozen=True, array_like=True):
    """What a prompt that is still computed has filled of the blocks that its offer will name."""

    handle: int
    attempt: int
    ref: PoolRef

    @property
    def key(self) -> RequestKey:
        """The request."""
        return RequestKey(self.handle, self.attempt)


class FilledLayers(msgspec.Struct, frozen=True, array_like=True):
    """The same, the last `n_blocks` of which hold their first `n_layers` layers alone.

    It has a magic of its own: who reads a `Filled` takes all that it names for whole. Only a decode
    worker with the feature HANDOFF_LAYERS is told it.
    """

    handle: int
    attempt: int
    ref: PoolRef
    n_blocks: int
    n_layers: int

    @property
    def key(self) -> RequestKey:
        """The request."""
        return RequestKey(self.handle, self.attempt)


def encode_filled(filled: KvFilled, pool_id: bytes) -> list[bytes]:
    """Return the frames that tell what is filled of blocks in this process's pool."""
    ref = PoolRef(pool_id, filled.kv.blocks, *filled.kv.lease)
    if filled.begun.n_blocks:
        layers = FilledLayers(*filled.key, ref, *filled.begun)
        return [LAYERS_MAGIC, msgspec.msgpack.encode(layers)]
    return [FILLED_MAGIC, msgspec.msgpack.encode(Filled(*filled.key, ref))]


def is_filled(frames: Sequence[Any]) -> bool:
    """Whether a message tells what is filled of a prompt's blocks."""
    return bool(frames) and bytes(frames[0]) in (FILLED_MAGIC, LAYERS_MAGIC)


def decode_filled(frames: Sequence[Any]) -> KvFilled:
    """Parse what is filled; the pool is its name (bytes).

    Raises:
        HandoffFormatError: it is nothing of the kind, or out of range.
    """
    if len(frames) != 2:
        raise HandoffFormatError(f"{len(frames)} frames tell what is filled, expected 2")
    kind: type[Filled | FilledLayers] = Filled
    if bytes(frames[0]) == LAYERS_MAGIC:
        kind = FilledLayers
    try:
        filled = msgspec.msgpack.decode(frames[1], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoffFormatError(f"what is filled: {error}") from error
    _bounded("filled", "handle", filled.handle, 1, (1 << 64) - 1)
    _bounded("filled", "attempt", filled.attempt, 0, 255)
    kv = _kv_of(filled.ref)
    if isinstance(filled, Filled):
        return KvFilled(filled.key, kv)
    _bounded("filled", "n_blocks", filled.n_blocks, 1, len(kv.blocks))
    _bounded("filled", "n_layers", filled.n_layers, 1, _MAX_LAYERS)
    return KvFilled(filled.key, kv, BegunBlocks(filled.n_blocks, filled.n_layers))


def encode_ask(ask: Ask | Withdrawal) -> list[bytes]:
    """Return the frames of an ask or of its withdrawal."""
    return [ASK_MAGIC, msgspec.msgpack.encode(ask)]


def decode_ask(frames: Sequence[Any]) -> Ask | Withdrawal:
    """Parse an ask or a withdrawal.

    Raises:
        HandoffFormatError: it is neither, or out of range.
    """
    if len(frames) != 2 or bytes(frames[0]) != ASK_MAGIC:
        raise HandoffFormatError(f"{len(frames)} frames are no ask")
    try:
        ask = msgspec.msgpack.decode(frames[1], type=Ask | Withdrawal)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandoffFormatError(f"ask: {error}") from error
    _bounded("ask", "handle", ask.handle, 1, (1 << 64) - 1)
    _bounded("ask", "attempt", ask.attempt, 0, 255)
    if isinstance(ask, Ask):
        _bounded("ask", "kv_bytes", ask.kv_bytes, 1, _MAX_KV_BYTES)
        _bounded("ask", "n_tokens", ask.n_tokens, 1, _MAX_CACHED_TOKENS)
        _bounded("ask", "turn", ask.turn, 0, _MAX_TURN)
    return ask


def is_ask(frames: Sequence[Any]) -> bool:
    """Whether a message that prefill sent is about a place, and no offer."""
    return bool(frames) and bytes(frames[0]) == ASK_MAGIC


def encode_offer(handoff: Handoff, pool_id: bytes = b"") -> list[Any]:
    """Return the multipart frames of an offer; KV frames alias the arrays.

    Args:
        pool_id: of this process's pool, for KV that stays there.
    """
    state = msgspec.msgpack.encode(handoff.state)
    if isinstance(handoff.kv, KvInPool):
        ref = PoolRef(pool_id, handoff.kv.blocks, *handoff.kv.lease)
        return [POOL_MAGIC, state, msgspec.msgpack.encode(ref)]
    return [MAGIC, state, *handoff.kv]


def decode_offer(frames: Sequence[Any]) -> Handoff:
    """Parse an offer; the KV arrays are read-only views of `frames`, the pool of KV that stays in
    one is its name (bytes).

    Raises:
        HandoffFormatError: wrong magic, undecodable or out-of-range state, wrong number or size of
            KV frames. Nothing is allocated from a number in the message before it is checked.
    """
    magic = bytes(frames[0]) if len(frames) > 1 else b""
    if magic not in (MAGIC, POOL_MAGIC):
        raise HandoffFormatError(f"{len(frames)} frames without the {MAGIC!r} magic are no offer")
    try:
        state = msgspec.msgpack.decode(frames[1], type=HandoffState)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandoffFormatError(f"handoff state: {error}") from error
    key = state.key
    try:
        _check_state(state)
        is_in_pool = magic == POOL_MAGIC
        return Handoff(state, (_in_pool if is_in_pool else _views)(state, frames[2:]))
    except HandoffFormatError as error:
        error.key = key if key.fits_the_wire else None
        raise


def encode_answer(answer: Answer) -> list[bytes]:
    """Return the frames of an answer."""
    return [MAGIC, msgspec.msgpack.encode(answer)]


def decode_answer(frames: Sequence[Any]) -> Answer:
    """Parse an answer.

    Raises:
        HandoffFormatError: it is none.
    """
    if len(frames) != 2 or bytes(frames[0]) != MAGIC:
        raise HandoffFormatError(f"{len(frames)} frames are no answer")
    try:
        answer = msgspec.msgpack.decode(frames[1], type=Answer)
        AnswerKind(answer.kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise HandoffFormatError(f"answer: {error}") from error
    return answer


def _bounded(what: str, name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise HandoffFormatError(f"{what}: {name} is {value}, not in {low}..{high}")


def _check_state(state: HandoffState) -> None:
    def bounded(name: str, value: int, low: int, high: int) -> None:
        _bounded("handoff state", name, value, low, high)

    bounded("handle", state.handle, 1, (1 << 64) - 1)
    bounded("attempt", state.attempt, 0, 255)
    bounded("n_layers", state.n_layers, 1, _MAX_LAYERS)
    bounded("kv_heads", state.kv_heads, 1, _MAX_HEADS)
    bounded("head_dim", state.head_dim, 1, _MAX_HEAD_DIM)
    bounded("block_size", state.block_size, 1, _MAX_BLOCK_SIZE)
    bounded("n_cached", state.n_cached, 1, _MAX_CACHED_TOKENS)
    bounded("len(drafts)", len(state.drafts), 0, _MAX_DRAFTS)
    bounded("width", state.width, 0, 1 + MAX_TOP_K)
    bounded("logprobs_k", state.logprobs_k, -1, MAX_TOP_K)
    if state.dtype not in _FORMS:
        raise HandoffFormatError(f"handoff state: dtype {state.dtype!r} is none of {[*_FORMS]}")
    n_prompt, n_output = len(state.prompt_token_ids), len(state.output_token_ids)
    if n_prompt + n_output != state.n_cached:
        raise HandoffFormatError(
            f"handoff state: {n_prompt} prompt tokens and {n_output} of output, "
            f"n_cached {state.n_cached}"
        )
    n_topk = max(state.width - 1, 0)
    if len(state.topk_tokens) != n_topk or len(state.topk_logprobs) != n_topk:
        raise HandoffFormatError(
            f"handoff state: width {state.width} with {len(state.topk_tokens)} top-k tokens and "
            f"{len(state.topk_logprobs)} top-k logprobs"
        )


def _in_pool(state: HandoffState, frames: Sequence[Any]) -> KvInPool:
    if len(frames) != 1:
        raise HandoffFormatError(f"{len(frames)} frames tell where KV lies, expected 1")
    try:
        ref = msgspec.msgpack.decode(frames[0], type=PoolRef)
    except msgspec.DecodeError as error:
        raise HandoffFormatError(f"where KV lies: {error}") from error
    n_blocks = math.ceil(state.n_cached / state.block_size)
    if len(ref.blocks) != n_blocks:
        raise HandoffFormatError(f"KV lies in {len(ref.blocks)} blocks, expected {n_blocks}")
    return _kv_of(ref)


def _kv_of(ref: PoolRef) -> KvInPool:
    return KvInPool(ref.blocks, LeaseName(ref.lease_slot, ref.lease_serial), ref.pool_id)


def _views(state: HandoffState, frames: Sequence[Any]) -> tuple[npt.NDArray[Any], ...]:
    n_blocks = math.ceil(state.n_cached / state.block_size)
    block: tuple[int, ...] = (state.kv_heads, state.block_size, state.head_dim)
    kind = state.dtype.removesuffix(BY_BLOCK)
    n_parts = 1 if kind.endswith(COMPRESSED) else 2
    n_frames = n_parts * state.n_layers
    if state.dtype.endswith(BY_BLOCK):
        block, n_frames = (state.n_layers, n_parts, *block), 1
    if len(frames) != n_frames:
        raise HandoffFormatError(f"{len(frames)} KV frames, expected {n_frames}")
    shape = (n_blocks, *block)
    dtype = _DTYPES[kind.removesuffix(COMPRESSED)]
    want_bytes = math.prod(shape) * dtype.itemsize
    for index, frame in enumerate(frames):
        if memoryview(frame).nbytes != want_bytes:
            raise HandoffFormatError(
                f"KV frame {index} has {memoryview(frame).nbytes} bytes, expected {want_bytes}"
            )
    return tuple(np.frombuffer(frame, dtype).reshape(shape) for frame in frames)
