"""Rendering of children as often as it must be: equal inputs come to equal hashes.

Most passes ask for what is there already. They compare hashes and render nothing; manifests are
rendered for a pass that writes, and not held beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from baton_operator.children.desired import (
    DesiredChild,
    Mark,
    Records,
    RenderContext,
    RenderInputs,
    children_of,
)
from baton_operator.cluster.store import ChildId
from baton_operator.models import ObjectKey
from baton_operator.names import ANNOTATION_MADE_FROM, LABEL_ROLE, Role


@dataclass(frozen=True, slots=True)
class Outline:
    """What a rendering came to: each child's mark; of `gateways` the children, and what their pods
    are made from (`ANNOTATION_MADE_FROM`).
    """

    marks: Mapping[ChildId, Mark]
    gateways: frozenset[ChildId]
    gateways_made_from: str

    def makes_gateways_otherwise(self, before: str) -> bool:
        """Whether gateways are made otherwise of what was asked for already.

        `before` is their annotation. What an operator that wrote none made of it nobody knows, so
        that it may be.
        """
        now = self.gateways_made_from
        asked = now.partition(".")[0]
        return bool(now) and now != before and (not before or before.partition(".")[0] == asked)


@dataclass(frozen=True, slots=True)
class Desired:
    """Every child that shall exist: known by its mark, rendered when one must be written.

    `keeps_gateways`: those that are there stay as they are for now.
    """

    outline: Outline
    render: Callable[[], list[DesiredChild]]
    keeps_gateways: bool = False

    @property
    def marks(self) -> Mapping[ChildId, Mark]:
        """The mark of each child that may be written."""
        every = self.outline.marks
        kept = self.outline.gateways if self.keeps_gateways else ()
        return {child: every[child] for child in every if child not in kept}


class _Known(NamedTuple):
    inputs: RenderInputs
    outline: Outline


class Renderer:
    """Renders, and remembers what the last inputs of each object came to."""

    def __init__(self, context: RenderContext) -> None:
        self._context = context
        self._known: dict[ObjectKey, _Known] = {}

    def desired(
        self, key: ObjectKey, inputs: RenderInputs, records: Callable[[], Records]
    ) -> Desired:
        """Return an object's children; `records` gives those of `inputs.recorded`."""

        def render() -> list[DesiredChild]:
            return children_of(inputs, records(), self._context)

        known = self._known.get(key)
        if known is not None and known.inputs == inputs:
            outline = known.outline
        else:
            children = render()
            outline, render = _outline(children), lambda: children
        self._known[key] = _Known(inputs, outline)  # equal inputs too, or two specs were held
        return Desired(outline, render)

    def forget(self, key: ObjectKey) -> None:
        """Forget an object that is gone."""
        self._known.pop(key, None)


def _outline(children: Iterable[DesiredChild]) -> Outline:
    gateways = [child for child in children if _is_of_gateways(child)]
    notes = (child.manifest["metadata"].get("annotations") or {} for child in gateways)
    return Outline(
        {child.child_id: child.mark for child in children},
        frozenset(child.child_id for child in gateways),
        next((note[ANNOTATION_MADE_FROM] for note in notes if note), ""),
    )


def _is_of_gateways(child: DesiredChild) -> bool:
    """Whether gateways' pods are made from it: their Deployment and their file."""
    labels = child.manifest["metadata"]["labels"]
    is_part = child.child_id.kind in ("Deployment", "ConfigMap")
    return is_part and labels.get(LABEL_ROLE) == Role.GATEWAY
