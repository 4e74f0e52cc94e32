"""MLA's rows go from pool to pool bit for bit, once a token, and nowhere else; what other models
say on the wire stays what it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from baton_testing.numpy_device import NumpyDevice
from baton_testing.pool_pair import memory_of
from baton_worker.engine.api import Handoff
from baton_worker.engine.backends.device.pool import DevicePool
from baton_worker.engine.kv.memory import CannotAttachError, Region
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.handoff import nixl_words, pool_words
from baton_worker.handoff.frames import HandoffFormatError, decode_offer, encode_offer
from baton_worker.handoff.pool_words import Introduction, PoolWordsError

HEADS = KvShape(n_layers=2, kv_heads=2, block_size=4, head_dim=8, n_blocks=6)
ROWS = dataclasses.replace(HEADS, kv_heads=1, head_dim=11, is_compressed=True)
POOL, LEASES = Region(1 << 40, 1 << 20, None), Region(1 << 41, 4096, None)
BOTH = pytest.mark.parametrize("is_by_block", [False, True], ids=["layered", "by-block"])


def pool_of(shape: KvShape) -> Any:
    if shape.is_by_block:
        return DevicePool(NumpyDevice(), shape, 1 << 20, is_shared=True)
    return KvPool(shape, is_shared=True)


def rows_of(shape: KvShape, n_blocks: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=form.shape).astype(form.dtype).copy() for form in shape.arrays(n_blocks)
    ]


def exported(pool: Any, blocks: list[int], n_positions: int) -> list[Any]:
    return [array.copy() for array in pool.begin_export(blocks, n_positions)()]


@BOTH
@pytest.mark.parametrize("n_positions", [1, 4, 7, 12])
def test_a_pool_gives_out_what_it_was_given_and_zeroes_the_tail(
    is_by_block: bool, n_positions: int
) -> None:
    shape = dataclasses.replace(ROWS, is_by_block=is_by_block)
    first, second = pool_of(shape), pool_of(shape)
    given = rows_of(shape, 3)
    first.import_blocks([5, 2, 7], given)
    moved = exported(first, [5, 2, 7], n_positions)
    second.import_blocks([3, 4, 6], moved)
    found = exported(second, [3, 4, 6], n_positions)
    n_blocks, tail = -(-n_positions // 4), (n_positions - 1) % 4 + 1
    assert len(found) == (1 if is_by_block else ROWS.n_layers)
    for array, wanted in zip(found, given, strict=True):
        assert not array[-1, ..., tail:, :].any()
        wanted = wanted[:n_blocks].copy()
        wanted[-1, ..., tail:, :] = 0
        assert array.tobytes() == wanted.tobytes()


@BOTH
def test_a_block_takes_its_rows_and_no_more(is_by_block: bool) -> None:
    shape = dataclasses.replace(ROWS, is_by_block=is_by_block)
    assert shape.block_bytes == 2 * 4 * 11 * 4
    assert sum(array.nbytes for array in shape.zeros(3)) == 3 * shape.block_bytes
    published = KvShape(61, 1, 16, 576, 1, "bfloat16", is_by_block=True, is_compressed=True)
    assert published.block_bytes == 16 * 61 * 576 * 2


@BOTH
def test_another_process_pulls_them_bit_for_bit(is_by_block: bool) -> None:
    shape = dataclasses.replace(ROWS, is_by_block=is_by_block)
    own, other = pool_of(shape), pool_of(shape)
    given = rows_of(shape, 2)
    other.import_blocks([5, 2], given)
    exported(other, [5, 2], 8)  # all that its owner launched has landed, as before an offer
    peer = own.sharing.attach(other.sharing.descriptors, other.sharing.n_bytes, other.shape)
    own.sharing.begin_pull([4, 3], peer, [5, 2]).wait()
    for array, wanted in zip(exported(own, [4, 3], 8), given, strict=True):
        assert array.tobytes() == wanted.tobytes()


@BOTH
def test_the_pieces_that_are_read_are_the_blocks(is_by_block: bool) -> None:
    """Byte by byte, as whoever reads memory and maps nothing does."""
    shape = dataclasses.replace(ROWS, is_by_block=is_by_block)
    memory = np.zeros((shape.n_blocks + 2) * shape.block_bytes, np.uint8)
    arrays, start = [], 0
    for form in shape.arrays(shape.n_blocks + 2):
        n_bytes = int(np.prod(form.shape)) * form.dtype.itemsize
        part = memory[start : start + n_bytes].view(form.dtype)
        arrays.append(part.reshape(form.shape))
        start += n_bytes
    assert start == len(memory)
    for array, values in zip(arrays, rows_of(shape, shape.n_blocks + 2), strict=True):
        array[:] = values
    to = np.zeros_like(memory)
    ((_, _, pieces),) = pool_of(shape).sharing.pieces([3, 6], [2, 5], shape)
    for source, target, n_bytes in pieces.tolist():
        to[target : target + n_bytes] = memory[source : source + n_bytes]
    start = 0
    for array in arrays:
        moved = to[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        start += array.nbytes
        np.testing.assert_array_equal(moved[[3, 6]], array[[2, 5]])
        assert not moved[[2, 4, 5, 7]].any()


SCATTERED = ([5, 2, 3], [4, 3, 7], [(0, 1), (1, 2), (0, 2)])
"""Of one block the layers in front, of another those behind, and one whole."""
NEIGHBOURS = ([2, 3, 4, 5, 7], [3, 4, 5, 6, 2], [(1, 2)] * 4 + [(0, 2)])
"""Of four that lie behind one another those behind: rows of one copy on a device."""


@BOTH
@pytest.mark.parametrize("way", ["pulled", "read"])
@pytest.mark.parametrize("shape", [ROWS, HEADS], ids=["rows", "heads"])
@pytest.mark.parametrize("places", [SCATTERED, NEIGHBOURS], ids=["scattered", "neighbours"])
def test_of_some_layers_no_other_is_touched(
    shape: KvShape, is_by_block: bool, way: str, places: Any
) -> None:
    shape = dataclasses.replace(shape, is_by_block=is_by_block)
    own, other = pool_of(shape), pool_of(shape)
    theirs, blocks, spans = (*places[:2], np.array(places[2]))
    n, n_positions = len(blocks), 4 * len(blocks)
    given, before = rows_of(shape, n), [1 - array for array in rows_of(shape, n)]
    other.import_blocks(theirs, given)
    own.import_blocks(blocks, before)
    exported(other, theirs, n_positions)
    exported(own, blocks, n_positions)
    sharing = other.sharing
    if way == "pulled":
        peer = own.sharing.attach(sharing.descriptors, sharing.n_bytes, other.shape)
        own.sharing.begin_pull(blocks, peer, theirs, spans).wait()
    else:
        ((_, _, pieces),) = own.sharing.pieces(blocks, theirs, shape, 1, spans)
        source, to = (memory_of(pool.sharing) for pool in (other, own))
        for there, here, n_bytes in pieces.tolist():
            to[here : here + n_bytes] = source[there : there + n_bytes]
    found = exported(own, blocks, n_positions)
    layers = [layers_of(shape, arrays) for arrays in (found, given, before)]
    for at, (start, stop) in enumerate(spans.tolist()):
        for layer in range(shape.n_layers):
            is_, new, old = (some[layer][:, at].tobytes() for some in layers)
            assert is_ == (new if start <= layer < stop else old)


def layers_of(shape: KvShape, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return of each layer its parts of all blocks, [parts, blocks, ...]."""
    if shape.is_by_block:
        return [arrays[0][:, layer].swapaxes(0, 1) for layer in range(shape.n_layers)]
    parts = shape.n_parts
    return [np.stack(arrays[at * parts : (at + 1) * parts]) for at in range(shape.n_layers)]


@BOTH
def test_pools_of_heads_and_of_rows_refuse_each_other_by_name(is_by_block: bool) -> None:
    rows = pool_of(dataclasses.replace(ROWS, is_by_block=is_by_block))
    heads = pool_of(dataclasses.replace(HEADS, is_by_block=is_by_block))
    for own, other in ((rows, heads), (heads, rows)):
        with pytest.raises(CannotAttachError, match=f"its form is '{other.shape.form}'"):
            own.sharing.attach(other.sharing.descriptors, other.sharing.n_bytes, other.shape)
    assert rows.shape.form.startswith("float32-compressed")


@pytest.fixture
def offered(make_handoff: Callable[..., Handoff]) -> Callable[[KvShape], Handoff]:
    """`offered(shape)`: an offer of 20 positions, of rows in this form."""

    def make(shape: KvShape) -> Handoff:
        state = msgspec.structs.replace(
            make_handoff().state,
            dtype=shape.form,
            n_layers=shape.n_layers,
            kv_heads=shape.kv_heads,
            block_size=shape.block_size,
            head_dim=shape.head_dim,
        )
        return Handoff(state, tuple(rows_of(shape, shape.blocks_for(state.n_cached))))

    return make


@BOTH
def test_an_offer_of_rows_survives_the_wire(
    offered: Callable[[KvShape], Handoff], is_by_block: bool
) -> None:
    handoff = offered(dataclasses.replace(ROWS, is_by_block=is_by_block))
    frames = [bytes(memoryview(frame)) for frame in encode_offer(handoff)]
    assert len(frames) == 2 + (1 if is_by_block else ROWS.n_layers)
    found = decode_offer(frames)
    assert found.state == handoff.state
    for array, wanted in zip(found.kv, handoff.kv, strict=True):
        assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
        assert array.tobytes() == wanted.tobytes()


def test_keys_and_values_are_no_rows(offered: Callable[[KvShape], Handoff]) -> None:
    handoff = offered(ROWS)
    frames = [bytes(memoryview(frame)) for frame in encode_offer(handoff)]
    with pytest.raises(HandoffFormatError, match="4 KV frames, expected 2"):
        decode_offer([*frames, *frames[2:]])
    whole = msgspec.structs.replace(handoff.state, dtype="float32")
    with pytest.raises(HandoffFormatError, match="2 KV frames, expected 4"):
        decode_offer([frames[0], msgspec.msgpack.encode(whole), *frames[2:]])


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_introduction_tells_that_rows_are_compressed(is_by_block: bool, dtype: Any) -> None:
    for shape in (HEADS, ROWS):
        shape = dataclasses.replace(shape, is_by_block=is_by_block, dtype=dtype)
        said = pool_words.introduction_of(shape, bytes(16), "prefill-0", "shm", 1 << 20, 4096)
        heard = pool_words.decode(pool_words.encode(said), Introduction)
        assert heard.shape == shape
        told = nixl_words.introduction_of(bytes(16), "prefill-0", b"meta", shape, POOL, LEASES)
        frames = nixl_words.encode_introduction(told)
        assert nixl_words.decode_introduction(frames).shape == shape


def test_who_knows_no_compressed_rows_refuses_them() -> None:
    """The version before took these two words for dtypes, and no other."""
    said = pool_words.introduction_of(ROWS, bytes(16), "prefill-0", "shm", 1 << 20, 4096)
    assert said.dtype == "float32-compressed"
    assert said.dtype not in ("float32", "bfloat16")
    unknown = msgspec.structs.replace(said, dtype="float32-squeezed")  # type: ignore[arg-type]
    with pytest.raises(PoolWordsError, match="float32-squeezed"):
        pool_words.decode(pool_words.encode(unknown), Introduction)


def test_what_others_say_of_their_pools_is_byte_for_byte_what_it_was() -> None:
    """As the release before compressed rows said it."""
    said = pool_words.introduction_of(HEADS, bytes(16), "prefill-0", "shm", 1 << 20, 4096)
    assert pool_words.encode(said) == bytes.fromhex(
        "8da86e5f6c617965727302a86b765f686561647302aa626c6f636b5f73697a6504a8686561645f64696d08a86e"
        "5f626c6f636b7306a56474797065a7666c6f61743332ab69735f62795f626c6f636bc2a7706f6f6c5f6964c410"
        "00000000000000000000000000000000a9776f726b65725f6964a970726566696c6c2d30a97472616e73706f72"
        "74a373686da76e5f6279746573ce00100000ab6c656173655f6279746573cd1000a776657273696f6e01"
    )
    told = nixl_words.introduction_of(bytes(16), "prefill-0", b"meta", HEADS, POOL, LEASES)
    assert nixl_words.encode_introduction(told)[1] == bytes.fromhex(
        "de0010a86e5f6c617965727302a86b765f686561647302aa626c6f636b5f73697a6504a8686561645f64696d08"
        "a86e5f626c6f636b7306a56474797065a7666c6f61743332ab69735f62795f626c6f636bc2a7706f6f6c5f6964"
        "c41000000000000000000000000000000000a9776f726b65725f6964a970726566696c6c2d30a86d6574616461"
        "7461c4046d657461a761646472657373cf0000010000000000a76e5f6279746573ce00100000a6646576696365"
        "ffad6c656173655f61646472657373cf0000020000000000ab6c656173655f6279746573cd1000a77665727369"
        "6f6e01"
    )


@pytest.mark.parametrize(
    ("shape", "form", "n_arrays"),
    [
        (HEADS, "float32", 4),
        (dataclasses.replace(HEADS, is_by_block=True), "float32-by-block", 1),
        (dataclasses.replace(ROWS, is_by_block=True), "float32-compressed-by-block", 1),
        (ROWS, "float32-compressed", 2),
    ],
)
def test_each_form_has_a_name_of_its_own(shape: KvShape, form: str, n_arrays: int) -> None:
    assert shape.form == form
    assert len(shape.arrays(3)) == n_arrays
