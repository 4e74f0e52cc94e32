"""A step as launches over fixed memory: one upload, the kernels, one download.

Owns the buffers that numbers travel in, and the graphs: a step that only decodes is launched once,
captured when its shape comes again, and replayed from then on. Knows no request.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from baton_worker.engine.api import Launched, LaunchKind
from baton_worker.engine.backends.device.decoder import Decoder, Fed, Group
from baton_worker.engine.backends.device.drafting import Drafter
from baton_worker.engine.backends.device.histories import HistoryMemory
from baton_worker.engine.backends.device.inputs import Flags, Inputs, flag_fields, input_fields
from baton_worker.engine.backends.device.layout import Layout
from baton_worker.engine.backends.device.lookup_kernels import Histories
from baton_worker.engine.backends.device.results import Results, Told, result_fields, stride
from baton_worker.engine.backends.device.sampler import Sampler
from baton_worker.engine.backends.device.seam import (
    Accepted,
    Device,
    Event,
    Graph,
    Host,
    Kernels,
    NextStep,
    Places,
    Tensor,
)
from baton_worker.engine.backends.device.shapes import StepShape
from baton_worker.engine.backends.device.workspace import NextSpace, Workspace
from baton_worker.engine.ngram import NgramSizes

_MOST_GRAPHS = 256
_MOST_PROMPTS = 64
"""Steps with prompts whose programs are kept: what is made for one is hundreds of views, which
takes the host milliseconds while the device has nothing to do."""


class Machine(NamedTuple):
    """What every step is launched with. `drafter`: None without an MTP layer; `histories`: None
    without lookup, whose n-grams are of `ngrams`.
    """

    device: Device
    kernels: Kernels
    decoder: Decoder
    sampler: Sampler
    drafter: Drafter | None
    space: Workspace
    histories: HistoryMemory | None = None
    ngrams: NgramSizes | None = None


class Mark(NamedTuple):
    """The point behind so many layers of a step."""

    n_layers: int
    came: Event


class Launch(NamedTuple):
    """A step that was launched.

    Attributes:
        began: right before its first kernel.
        marks: behind some of its layers, where they are asked for.
        is_first: it had no graph that a step before it was launched by.
    """

    kind: LaunchKind
    began: Event
    marks: tuple[Mark, ...] = ()
    is_first: bool = False


class Launches:
    """How steps got onto the device, counted.

    Attributes:
        by_kind: steps and their time.
        captured: graphs that were made.
        kept: graphs at hand, by the sequences that each is of.
    """

    def __init__(self) -> None:
        self.by_kind = dict.fromkeys(LaunchKind, Launched())
        self.captured = 0
        self.kept: Counter[int] = Counter()

    def count(self, kind: LaunchKind, steps: int = 0, seconds: float = 0.0) -> None:
        """Add steps, or the time of some."""
        before = self.by_kind[kind]
        self.by_kind[kind] = Launched(before.steps + steps, before.seconds + seconds)


class _Lane(NamedTuple):
    """Page-locked memory that a step travels in: uint8[*] for each direction."""

    up: Host
    down: Host


class _Buffers(NamedTuple):
    """uint8[*] of the device, and lanes enough for the steps that are under way at once."""

    device: Tensor
    lanes: tuple[_Lane, ...]


N_LANES = 2
"""Steps under way at once: one computes while the next one is laid out."""


class Program:
    """The launches of steps of one shape.

    Attributes:
        inputs: the host's, of each lane, to be filled before `start`.
    """

    def __init__(
        self, shape: StepShape, machine: Machine, buffers: _Buffers, launches: Launches
    ) -> None:
        self.shape = shape
        self._launches = launches
        self._machine = machine
        self._layouts = layouts(shape)
        self._lanes = buffers.lanes
        inputs, flags, results = self._layouts
        device, memory = machine.device, buffers.device
        self.inputs = [Inputs(**inputs.on_host(lane.up)) for lane in buffers.lanes]
        self._told = Inputs(**inputs.on_device(device, memory))
        self._next = self._space().of(shape.sequences, shape.q_len, shape.rows_each - 1)
        self._inputs = self._told
        if shape.is_repeated:
            self._inputs = self._told._replace(**fed_next(self._next))
        self._flags = Flags(**flags.on_device(device, memory))
        self._results = Results(**results.on_device(device, memory))
        drafts = (shape.n_made, stride(shape))
        self._drafts = device.view(memory, results.at("drafts"), drafts, "int32")
        self._uploaded = device.rows(memory, 0, flags.stop)
        self._downloaded = device.rows(memory, flags.start, results.stop)
        self._n_runs = 0
        self._graph: Graph | None = None

    def start(self, lane: int, is_ahead: bool = False, is_marked: bool = False) -> Launch:
        """Upload a lane's inputs and launch the step.

        Args:
            is_ahead: what is fed is told by the step before; see `NextStep`.
            is_marked: its layers are wanted; of a step with prompts.
        """
        device, (_, flags, _) = self._machine.device, self._layouts
        up = self._lanes[lane].up
        up[flags.start : flags.stop] = 0
        device.upload(up[: flags.stop], self._uploaded)
        if self.shape.sequences and self.shape.is_repeated != is_ahead:
            self._pass_on(is_ahead)
        is_first = self._graph is None
        if self.shape.is_repeated and self._n_runs and is_first:
            self._graph = device.capture(self._launch)
            self._launches.captured += 1
            self._launches.kept[self.shape.n_sampled] += 1
        began, marks = device.record(), list[Mark]()
        if self._graph is not None:
            kind = LaunchKind.GRAPH
            self._graph.replay()
        else:
            kind = LaunchKind.DECODE if self.shape.is_repeated else LaunchKind.MIXED
            note = lambda n_layers: marks.append(Mark(n_layers, device.record()))  # noqa: E731
            self._launch(note if is_marked else None)
        self._launches.count(kind, steps=1)
        self._n_runs += 1
        return Launch(kind, began, tuple(marks), is_first)

    def _pass_on(self, is_ahead: bool) -> None:
        """Bring what sequences feed to where this step's kernels read it: a graph where a step
        before it may write it, others among the inputs.
        """
        for name, told in fed_next(self._next).items():
            own = self._first(name, told)
            source, to = (told, own) if is_ahead else (own, told)
            self._machine.device.copy(source, to)

    def _first(self, name: str, told: Tensor) -> Tensor:
        """Return the part of an input that sequences which decode have: the first."""
        own = getattr(self._told, name)
        return own if self.shape.is_repeated else self._machine.device.rows(own, 0, told.shape[0])

    def finish(self, lane: int) -> Event:
        """Begin to download the results, and what all ranks say of the sums that made them."""
        if (collective := self._machine.decoder.collective) is not None:
            collective.tell(self._flags.ranks)
        return self._machine.device.download(self._downloaded, self._down(lane))

    def count_time(self, launch: Launch, came: Event) -> None:
        """Count what a step took of the device's time, once `finish`'s event has come."""
        self._launches.count(launch.kind, seconds=came.seconds_since(launch.began))

    def told_inputs(self, lane: int) -> Host:
        """Return the bytes of a lane's inputs, for other ranks to repeat the step."""
        return self._lanes[lane].up[: self._layouts[0].stop]

    def check_ranks(self, told: Told) -> None:
        """Refuse a step whose sums not all ranks came to; see `Collective.refuse`."""
        if (collective := self._machine.decoder.collective) is not None:
            collective.refuse(told.flags.ranks)

    def drop(self) -> None:
        """Count its graph as gone."""
        if self._graph is not None:
            self._launches.kept[self.shape.n_sampled] -= 1

    def told(self, lane: int) -> Told:
        """Return the results, once `finish`'s event has come."""
        _, flags, results = self._layouts
        own = np.array(self._down(lane))
        return Told(
            Flags(**flags.on_host(own, flags.start)), Results(**results.on_host(own, flags.start))
        )

    def _down(self, lane: int) -> Host:
        _, flags, results = self._layouts
        return self._lanes[lane].down[: results.stop - flags.start]

    def _launch(self, mark: Callable[[int], None] | None = None) -> None:
        machine, shape, inputs = self._machine, self.shape, self._inputs
        fed, space = self._fed(), machine.space.tokens(shape.n_tokens)
        accepted = Accepted(self._results.n_accepted, self._results.token)
        machine.decoder.run(fed, space, mark)
        machine.kernels.broken_rows(space.residual, self._flags.hidden)
        if shape.n_sampled:
            self._choose(accepted)
        if machine.drafter is not None:
            machine.drafter.propose(shape, fed, inputs, self._flags, accepted, self._results)
        if shape.n_sampled and shape.n_found:
            self._look_up(accepted)
        if shape.n_sampled and shape.n_mtp <= 1:
            self._advance(accepted)
        machine.decoder.end_unit()

    def _look_up(self, accepted: Accepted) -> None:
        """Write the drafts behind the MTP layer's."""
        machine, inputs = self._machine, self._inputs
        assert machine.histories is not None, "of a shape in which lookup makes drafts"
        assert machine.ngrams is not None, "of a shape in which lookup makes drafts"
        tokens = machine.histories.tokens
        places = Histories(inputs.starts, inputs.first, inputs.history, tokens)
        n_before = self.shape.n_drafts
        machine.kernels.look_up(accepted, places, self._drafts, n_before, machine.ngrams)

    def _advance(self, accepted: Accepted) -> None:
        """Tell a step that may be launched behind this one what it feeds, with lookup's drafts and
        without; what this one was told is overwritten last.
        """
        shape, inputs, space = self.shape, self._inputs, self._machine.space
        fed = self._next._replace(first=inputs.first, draws=inputs.positions)
        behind = [(space.next, shape.n_drafts)]
        if shape.n_found:
            behind.append((space.next_with_found, shape.n_made))
        for own, n_drafts in sorted(behind, key=lambda one: one[0] is self._space()):
            out = own.of(shape.n_sampled, n_drafts + 1, n_drafts)
            drafts = self._machine.device.rows(self._drafts, 0, n_drafts)
            self._machine.kernels.advance(accepted, inputs.starts, drafts, fed, out)

    def _space(self) -> NextSpace:
        """Return where a step like this is told what it feeds."""
        space = self._machine.space
        return space.next_with_found if self.shape.feeds_found else space.next

    def _choose(self, accepted: Accepted) -> None:
        machine, shape, inputs = self._machine, self.shape, self._inputs
        rows, normed = machine.space.rows(shape.n_rows), machine.space.tokens(shape.n_tokens).final
        if not shape.are_rows_all:
            machine.kernels.gather(normed, inputs.rows, rows.hidden)
            normed = rows.hidden
        machine.decoder.logits(normed, rows.logits)
        machine.sampler.choose(shape, inputs, self._flags, accepted, rows)
        if shape.most_top >= 0:
            machine.sampler.score(shape, inputs, accepted, self._results, rows)

    def _fed(self) -> Fed:
        shape, inputs, rows = self.shape, self._inputs, self._machine.device.rows
        groups = []
        start = shape.n_decoded
        if shape.sequences:
            tables = rows(inputs.tables, 0, shape.sequences)
            groups.append(Group(0, start, tables, rows(inputs.contexts, 0, shape.sequences)))
        for table, n_tokens in enumerate(shape.chunks, shape.sequences):
            tables = rows(inputs.tables, table, table + 1)
            contexts = rows(inputs.contexts, table, table + 1)
            groups.append(Group(start, start + n_tokens, tables, contexts))
            start += n_tokens
        places = Places(inputs.sequence, inputs.position, inputs.tables)
        return Fed(inputs.tokens, places, tuple(groups))


class Programs:
    """The programs of an engine, made as their shapes come.

    Args:
        largest: a step whose buffers hold nearly all others'.

    Attributes:
        launches: of all of them.
    """

    def __init__(self, machine: Machine, largest: StepShape) -> None:
        self._machine = machine
        self.launches = Launches()
        self._repeated: OrderedDict[StepShape, Program] = OrderedDict()
        self._prompts: OrderedDict[StepShape, Program] = OrderedDict()
        self._n_bytes = layouts(largest)[2].stop
        self._buffers = self._made()

    def of(self, shape: StepShape) -> Program:
        """Return the program for a shape; it is kept for the next step like it.

        Those with prompts are of any size, so that they never cost others their graphs.
        """
        kept = self._repeated if shape.is_repeated else self._prompts
        if (known := kept.get(shape)) is not None:
            kept.move_to_end(shape)
            return known
        program = kept[shape] = self._new(shape)
        if len(kept) > (_MOST_GRAPHS if shape.is_repeated else _MOST_PROMPTS):
            _drop_oldest(kept)
        return program

    def _new(self, shape: StepShape) -> Program:
        n_bytes = layouts(shape)[2].stop
        if n_bytes > self._n_bytes:
            for kept in (self._repeated, self._prompts):
                while kept:  # they are of the old memory, and so are their graphs
                    _drop_oldest(kept)
            self._n_bytes = 2 * n_bytes
            self._buffers = self._made()
        return Program(shape, self._machine, self._buffers, self.launches)

    def _made(self) -> _Buffers:
        device, n_bytes = self._machine.device, self._n_bytes
        lanes = tuple(_Lane(device.host(n_bytes), device.host(n_bytes)) for _ in range(N_LANES))
        return _Buffers(device.empty((n_bytes,), "uint8"), lanes)


def _drop_oldest(kept: OrderedDict[StepShape, Program]) -> None:
    _, program = kept.popitem(last=False)
    program.drop()


def fed_next(step: NextStep) -> dict[str, Tensor]:
    """Return by their names in `Inputs` the fields that a step may be told by the one before."""
    return {
        "tokens": step.tokens,
        "position": step.position,
        "contexts": step.contexts,
        "first": step.first,
        "count": step.count,
        "positions": step.draws,
        "draft": step.draft,
    }


def layouts(shape: StepShape) -> tuple[Layout, Layout, Layout]:
    """Return where inputs, flags and results lie, one behind the other."""
    inputs = Layout(input_fields(shape))
    flags = Layout(flag_fields(shape), inputs.stop)
    return inputs, flags, Layout(result_fields(shape), flags.stop)
