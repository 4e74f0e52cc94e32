"""What is asked of the workers for one sequence, in one record that everything on its way holds.

`Submit` and `HandoffState` are this record and what is their own; the gateway's choices, the
engine's requests and what prefill leaves hold it. So a field that is added here gets everywhere.
Stop *strings* are not here: text exists only in the gateway, which ends such a request itself.
The engine sees token ids alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

import msgspec

SMALLEST_FLOAT32: Final = 2.0**-126
"""The least positive float32 of full precision: what is nearer to 0 may be 0 in a step."""
MAX_INT32: Final = (1 << 31) - 1
MAX_LOGIT_BIAS: Final = 100.0
MAX_PRIORITY: Final = 1000
"""Priorities are -1000 to 1000."""


class Bounds(NamedTuple):
    """The values of a parameter: `low` to `high`, both included, and 0 with `or_zero`.

    Steps compute in float32; what is within these bounds is neither 0 nor infinite there.
    """

    low: float
    high: float
    or_zero: bool = False

    def hold(self, value: float) -> bool:
        """Whether `value` is allowed; NaN never is."""
        return self.low <= value <= self.high or (self.or_zero and value == 0.0)

    def __str__(self) -> str:
        low, high = (v if isinstance(v, int) else f"{v:g}" for v in (self.low, self.high))
        return f"{'0 or ' if self.or_zero else ''}{low} to {high}"


SAMPLING_BOUNDS: Final[Mapping[str, Bounds]] = MappingProxyType(
    {
        "temperature": Bounds(SMALLEST_FLOAT32, 2.0, or_zero=True),
        "top_p": Bounds(SMALLEST_FLOAT32, 1.0),
        "top_k": Bounds(0, MAX_INT32),
        "presence_penalty": Bounds(-2.0, 2.0),
        "frequency_penalty": Bounds(-2.0, 2.0),
        "repetition_penalty": Bounds(0.001, 10.0),
        "max_tokens": Bounds(1, MAX_INT32),
        "min_tokens": Bounds(0, MAX_INT32),
        "min_p": Bounds(SMALLEST_FLOAT32, 1.0, or_zero=True),
    }
)
"""What gateways refuse of these fields of `SamplingParams`, and workers once more."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the next token is chosen and when the request ends.

    The gateway checks ranges (`SAMPLING_BOUNDS`) before it submits, and the worker again, because
    an older gateway may allow more than its steps survive.

    Attributes:
        temperature: 0 means greedy; otherwise logits are divided by it.
        top_p: nucleus mass in (0, 1]; a token stays while the mass before it is <= top_p.
        top_k: 0 means no limit.
        seed: 64-bit key of the counter-based noise. The draw at an output position depends on
            (seed, position) only, so it is equal under any batch, role or draft count.
        presence_penalty, frequency_penalty: subtracted from logits of generated tokens (OpenAI).
        repetition_penalty: divides positive, multiplies negative logits of seen tokens, prompt too.
        max_tokens: output tokens allowed, >= 1.
        min_tokens: end-of-sequence and stop tokens are masked before this many output tokens.
        ignore_eos: the end-of-sequence token does not end the request.
        stop_token_ids: tokens that end the request, themselves included in the output.
        min_p: tokens less likely than `min_p` times the likeliest are left out, in [0, 1]; taken
            after the temperature and before top_k and top_p.
        logit_bias: (token, value) pairs, tokens distinct; the value is added to the token's logit
            before penalties.
        bad_words: token sequences, none empty: the last token of one is never emitted after the
            tokens before it. Only the output counts.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the highest processed logit always wins."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens came before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


class LogprobParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which logprobs a request wants; how many alternatives each has is `logprobs_k`, beside it.

    By default the raw one: log-softmax of the logits as the model gave them (R34).

    Attributes:
        processed: of the logits after bias, penalties, masks and division by the temperature, that
            is what top_k, top_p and min_p then cut.
        temp_scaled: of the raw logits divided by the temperature; adds nothing to `processed`.
        top_p_normalized: of the nucleus of the above alone, when top_p is below 1: what is outside
            gets float32's lowest value.
        draft_ids: tell which drafts each step verified.
        draft_logprobs: tell them with the draft model's own logprobs, raw, where it made them.
        prompt_k: alternatives of each prompt token, whose logprobs are always raw; -1: none told.

    Temperature 0 divides by 1, and one below 1e-5 by 1e-5.
    """

    processed: bool = False
    temp_scaled: bool = False
    top_p_normalized: bool = False
    draft_ids: bool = False
    draft_logprobs: bool = False
    prompt_k: int = -1

    @property
    def is_raw(self) -> bool:
        """Whether the untouched logits are described."""
        return not (self.processed or self.temp_scaled or self.top_p_normalized)


RAW_LOGPROBS = LogprobParams()


LOGPROB_PARAMS: Final = "logprob_params"
"""Feature of a worker that reads `logprobs`; an older one would give raw logprobs."""
RESUME: Final = "resume"
"""Feature of a worker that reads `output_token_ids`; an older one would begin anew."""
CACHE_SALT: Final = "cache_salt"
"""Feature of a worker that reads `cache_salt`; an older one would share KV, and tell of it by its
speed and `usage`, across salts."""
REQUEST_FEATURES: Final = (LOGPROB_PARAMS, RESUME, CACHE_SALT)
"""What this version's workers read of a request beyond what the first version's did."""


class RequestParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """All that was asked of one sequence, and what of it was given out before.

    Attributes:
        prompt_token_ids: at least one token where it is one sequence's.
        sampling: validated parameters, with `seed` filled in.
        logprobs_k: -1 none, 0 sampled token only, 1..64 that many alternatives.
        logprobs: which distribution logprobs describe.
        priority: lower is served first; requests of equal priority in the order of their arrival.
        output_token_ids: what an earlier attempt gave out; the request goes on behind it. They
            count as output in all respects.
        cache_salt: KV is shared between requests of one salt only (a digest of the client's).
        traceparent: W3C trace context, or "".
    """

    prompt_token_ids: tuple[int, ...] = ()
    sampling: SamplingParams
    logprobs_k: int = -1
    logprobs: LogprobParams = RAW_LOGPROBS
    priority: int = 0
    output_token_ids: tuple[int, ...] = ()
    cache_salt: bytes = b""
    traceparent: Annotated[str, msgspec.Meta(max_length=1024)] = ""

    @property
    def features(self) -> tuple[str, ...]:
        """What its workers must be able to do beyond the first version's.

        Ids of drafts are a courtesy: an older worker tells their number all the same.
        """
        needed = msgspec.structs.replace(self.logprobs, draft_ids=False)
        return (
            *(() if needed == RAW_LOGPROBS else (LOGPROB_PARAMS,)),
            *((CACHE_SALT,) if self.cache_salt else ()),
        )

    def fields(self) -> dict[str, Any]:
        """Return what was asked by field, for the message that is to carry it."""
        return {name: getattr(self, name) for name in RequestParams.__struct_fields__}
