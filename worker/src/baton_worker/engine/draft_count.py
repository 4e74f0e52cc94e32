"""K, how many drafts are proposed per sequence and step, as it is set now.

Owns the bounds within which it may be set. Set by the engine's thread, read by any.
"""

from __future__ import annotations

from baton_worker.engine.options import MAX_DRAFTS, DraftSources


class DraftCount:
    """See the module.

    Args:
        sources: where drafts come from.
        count: K at start.
    """

    def __init__(self, sources: DraftSources, count: int) -> None:
        self._sources = sources
        self._count = count

    @property
    def count(self) -> int:
        """K."""
        return self._count

    @property
    def most(self) -> int:
        """Largest K that may be set: 0 without a drafting method."""
        return 0 if self._sources.is_none else MAX_DRAFTS

    @property
    def model_steps(self) -> int:
        """How many of the drafts the MTP layer makes."""
        return self._sources.model_steps(self._count)

    def set(self, count: int) -> None:
        """Change K.

        Raises:
            ValueError: not in 0..5, or drafts asked of an engine that makes none.
        """
        if not 0 <= count <= MAX_DRAFTS:
            raise ValueError(f"num_speculative_tokens is {count}, allowed are 0..{MAX_DRAFTS}")
        if count > self.most:
            raise ValueError(
                f"num_speculative_tokens is {count}, but this engine makes no drafts: "
                "speculative.method is 'none'"
            )
        self._count = count
