"""A checkpoint read against the shape that config.json promises: no key missing, none unread.

Owns the refusals of a checkpoint that does not fit, whoever wants its tensors and wherever they
go. Knows no layout of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from baton_worker.engine.model import naming
from baton_worker.engine.model.checkpoint import CheckpointError, StoredTensor
from baton_worker.engine.model.experts import Experts
from baton_worker.engine.model.families.registry import family_of
from baton_worker.engine.model.quantisation import E4M3, is_kept
from baton_worker.engine.model.shape import ModelShape

_COMPARED_VALUES = 1 << 24
"""How many values of a copy are compared at once: a whole head would be gigabytes as float32."""


class CheckedReader:
    """Hands out stored tensors of expected shapes and remembers which keys were asked for.

    Args:
        on_passed: told of each tensor's bytes when the next one is asked for.
    """

    def __init__(
        self,
        checkpoint: Mapping[str, StoredTensor],
        model_shape: ModelShape,
        on_passed: Callable[[int], None] = lambda n_bytes: None,
    ) -> None:
        self._checkpoint = checkpoint
        self._model_shape = model_shape
        self._on_passed = on_passed
        self._asked_bytes = 0
        self._read: set[str] = set()
        self._compared: set[tuple[str, str]] = set()
        quantisation = model_shape.quantisation
        self._kept = quantisation.patterns() if quantisation is not None else ()

    def stored(self, key: str, shape: tuple[int, ...]) -> StoredTensor:
        """Return a tensor that must be there.

        Raises:
            CheckpointError: it is missing or of another shape.
        """
        stored = self._checkpoint.get(key)
        if stored is None:
            raise CheckpointError(f"{key}: missing key for {self._expectation()}{self._files()}")
        if key not in self._read:
            self._read.add(key)
            self._on_passed(self._asked_bytes)
            self._asked_bytes = stored.raw.nbytes
        if stored.shape != shape:
            raise CheckpointError(
                f"{key}: expected shape {shape}, found {stored.shape}{stored.where}"
            )
        return stored

    def scales(
        self, key: str, shape: tuple[int, ...], as_stored: bool = False
    ) -> StoredTensor | None:
        """Return the scales of a decoder's matrix `[out, in]`, None for one that is not quantised.

        Args:
            as_stored: whether it is quantised is what its dtype says, and no promise of the
                config's: of projections that drafts alone need.

        Raises:
            CheckpointError: the matrix is stored otherwise than the config says, or scales are
                missing, of another shape, negative, or not finite.
        """
        quantisation = self._model_shape.quantisation
        if quantisation is None:
            return None
        found = self.stored(key, shape).dtype
        must_be_float = is_kept(key, self._kept)
        if found != E4M3 and (must_be_float or as_stored):
            return None
        if (found == E4M3) == must_be_float:
            wanted = "as floats" if must_be_float else f"as {E4M3}, or in its list of what is not"
            raise CheckpointError(
                f"{key}: stored as {found}, quantization_config wants it {wanted}"
            )
        scales = self.stored(quantisation.scale_key(key), quantisation.scale_shape(shape))
        values = scales.float32()
        if not (values >= 0.0).all():
            raise CheckpointError(f"{scales.key}: scales must be >= 0, and are not{scales.where}")
        return scales

    def skip(self, key: str) -> None:
        """Count a key as read that somebody else reads."""
        self._read.add(key)

    def mtp_keys(self, index: int) -> naming.MtpKeys:
        """Return the keys of MTP layer `index`, once what it repeats is known to be equal.

        Raises:
            CheckpointError: a copy differs from its original.
        """
        model_shape = self._model_shape
        keys = self._mtp_keys(index)
        if keys.proj not in self._checkpoint:
            hint = "0 for a checkpoint without draft layers"
            raise CheckpointError(
                f"{keys.proj}: missing key for {self._expectation()}: num_nextn_predict_layers is "
                f"{model_shape.n_mtp_layers}; {hint}{self._files()}"
            )
        for copy, original in keys.copies:
            self.check_copy(copy, original)
        return keys

    def _mtp_keys(self, index: int) -> naming.MtpKeys:
        model_shape = self._model_shape
        return naming.present_mtp(
            family_of(model_shape.model_type).mtp_namings,
            index,
            model_shape.n_layers,
            self._checkpoint,
            model_shape.tie_word_embeddings,
        )

    def refuse_fused(self, keys: naming.LayerKeys) -> None:
        """Refuse experts that are stored in one tensor.

        Raises:
            CheckpointError: they are; the message names it.
        """
        if keys.fused_experts in self._checkpoint:
            raise CheckpointError(
                f"{keys.fused_experts}: experts in one tensor are not supported, supported is a "
                f"tensor for each, as {keys.expert(0).gate_up[0]} (save_original_format)"
            )

    def has_own_norm(self, keys: naming.MtpKeys) -> bool:
        """Whether an MTP layer has a final norm of its own; else the main model's is its."""
        return keys.needs_final_norm or keys.final_norm in self._checkpoint

    def choice_bias(self, keys: naming.LayerKeys, experts: Experts) -> StoredTensor | None:
        """Return what counts for the choice of experts alone, of `experts.count` values in a row;
        None for families without.

        Raises:
            CheckpointError: it is missing, of another shape, or holds NaN or infinity.
        """
        if not experts.has_choice_bias:
            return None
        key = f"{keys.prefix}.{family_of(self._model_shape.model_type).choice_bias}"
        found = self._checkpoint.get(key)
        is_row = found is not None and found.shape == (1, experts.count)
        stored = self.stored(key, (1, experts.count) if is_row else (experts.count,)).flat()
        stored.float32()  # refused before anything is copied: nobody would miss such an expert
        return stored

    def check_copy(self, copy: str, original: str) -> None:
        """Refuse a copy, if the checkpoint holds it, of `[V, H]` that differs from its original.

        Raises:
            CheckpointError: it does, or one of them is of another shape.
        """
        if copy not in self._checkpoint or (copy, original) in self._compared:
            return
        shape = (self._model_shape.vocab_size, self._model_shape.hidden_size)
        first, second = self.stored(copy, shape), self.stored(original, shape)
        step = max(_COMPARED_VALUES // shape[1], 1)
        for start in range(0, shape[0], step):
            rows = slice(start, start + step)
            if not _are_equal(first.part(rows), second.part(rows)):
                raise CheckpointError(
                    f"{copy}: must equal {original}, and does not{first.where}{second.where}"
                )
        self._compared.add((copy, original))

    def refuse_unread(self) -> None:
        """Refuse a checkpoint with more than what was asked for.

        Raises:
            CheckpointError: it holds an unknown key.
        """
        unknown = sorted(
            key for key in self._checkpoint.keys() - self._read if not naming.is_ignorable(key)
        )
        if unknown:
            more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
            raise CheckpointError(
                f"{unknown[0]}: unknown key{more} for {self._expectation()}{self._draft_hint()}"
                f"{self._checkpoint[unknown[0]].where}"
            )

    def _draft_hint(self) -> str:
        """Say which field does not tell of a draft layer that the checkpoint has."""
        told = self._model_shape.n_mtp_layers
        if self._mtp_keys(told).proj not in self._checkpoint:
            return ""
        return f": num_nextn_predict_layers is {told}, and there are more draft layers"

    def _files(self) -> str:
        """Name the files, for the end of a message about what is in none."""
        paths = {tensor.file.path for tensor in self._checkpoint.values() if tensor.file}
        if len(paths) < 2:
            return "".join(f" ({path})" for path in paths)
        return f" ({min(paths).parent}, {len(paths)} files)"

    def _expectation(self) -> str:
        model_shape = self._model_shape
        layers = f"{model_shape.n_layers} layers and {model_shape.n_mtp_layers} MTP layers"
        return f"{model_shape.model_type} with {layers}"


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors have the same values, which is dear to tell unless the bits are."""
    if first.dtype == second.dtype == "BF16" and np.array_equal(_bits(first), _bits(second)):
        return True
    return np.array_equal(first.float32(), second.float32())


def _bits(stored: StoredTensor) -> npt.NDArray[np.uint16]:
    bits = np.empty(stored.shape, np.uint16)
    stored.write_to(bits, slice(None))
    return bits
