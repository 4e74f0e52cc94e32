"""What a device does for a runner, on whichever rank: memory, weights' launches, their programs.

Owns how these are put together for a model and an engine's limits. Rank 0's runner says what to do;
a follower repeats it. Knows no plan and no request.
"""

from __future__ import annotations

from typing import NamedTuple

from baton_worker.engine.backends.device.collective import Collective
from baton_worker.engine.backends.device.decoder import Decoder
from baton_worker.engine.backends.device.drafting import Drafter
from baton_worker.engine.backends.device.histories import HistoryMemory
from baton_worker.engine.backends.device.penalties import PenaltyCounts
from baton_worker.engine.backends.device.program import Machine, Programs
from baton_worker.engine.backends.device.prompts import PromptScorer
from baton_worker.engine.backends.device.sampler import Sampler
from baton_worker.engine.backends.device.seam import Device, Kernels, Tensor
from baton_worker.engine.backends.device.shapes import Choice, StepShape
from baton_worker.engine.backends.device.weights import DeviceWeights
from baton_worker.engine.backends.device.workspace import Sizes, Workspace
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.options import MAX_DRAFTS, EngineOptions

_PROMPT_ROWS = 256
_RULES = 4096


class DeviceModel(NamedTuple):
    """A model on a device, or a rank's part of one.

    kv: E[blocks, layers, 2, Hkv, block_size, D], see `kv.pool`. collective: the rank's, None for a
    model that is whole; then `model_shape` is of the part.
    """

    device: Device
    kernels: Kernels
    model_shape: ModelShape
    weights: DeviceWeights
    kv: Tensor
    collective: Collective | None = None


class Steps:
    """The device's side of a runner.

    Attributes:
        space, counts, prompts, programs: see each.
        histories: None without lookup.

    Raises:
        DeviceError: the device has too little memory for the largest step.
    """

    def __init__(self, model: DeviceModel, options: EngineOptions) -> None:
        model_shape, (device, kernels) = model.model_shape, model[:2]
        space = Workspace(device, kernels, model_shape, model.weights.dtype, sizes_of(options))
        decoder = Decoder(
            device,
            kernels,
            model_shape,
            model.weights,
            model.kv,
            space.attention,
            space.sizes.positions,
            model.collective,
        )
        self.space = space
        self.counts = PenaltyCounts(device, options.max_running, model_shape.vocab_size)
        self.prompts = PromptScorer(device, kernels, decoder, space, options.max_top_k)
        ngrams, self.histories = options.drafts.ngram, None
        if ngrams is not None:
            self.histories = HistoryMemory(device, options.max_running, options.max_model_len)
        machine = Machine(
            device=device,
            kernels=kernels,
            decoder=decoder,
            sampler=Sampler(device, kernels, self.counts, space.logprobs),
            drafter=Drafter(device, kernels, decoder, space) if options.use_mtp else None,
            space=space,
            histories=self.histories,
            ngrams=ngrams,
        )
        self.programs = Programs(machine, _largest(options))


def sizes_of(options: EngineOptions) -> Sizes:
    """Return the sizes of the largest step that these options allow."""
    decoded = options.max_running * (MAX_DRAFTS + options.n_open_tokens)
    return Sizes(
        tokens=decoded + options.prefill_tokens,
        sequences=options.max_running,
        decoded=decoded,
        rows=options.max_running * (MAX_DRAFTS + 1),
        positions=options.table_width * options.block_size,
        prompt_rows=_PROMPT_ROWS,
        n_mtp=options.n_mtp,
    )


def _largest(options: EngineOptions) -> StepShape:
    return StepShape(
        sequences=options.max_running,
        q_len=MAX_DRAFTS + options.n_open_tokens,
        chunks=(options.prefill_tokens,),
        n_complete=1,
        width=options.table_width,
        choice=Choice.PROCESSED,
        most_top=options.max_top_k,
        n_drafts=MAX_DRAFTS,
        draft_top=options.max_top_k,
        n_rules=_RULES,
        n_mtp=options.n_mtp,
        n_known=options.n_open_tokens,
        n_found=MAX_DRAFTS,
    )
