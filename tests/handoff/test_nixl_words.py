"""What is said about pools that NIXL reads is what it must be, or an error that says how not."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton_worker.engine.kv.memory import Region
from baton_worker.engine.kv.payload import KvShape
from baton_worker.handoff import nixl_words
from baton_worker.handoff.nixl_words import Introduction, NixlWordsError, Welcome

SHAPE = KvShape(n_layers=2, kv_heads=2, block_size=4, head_dim=8, n_blocks=6)
POOL, LEASES = Region(1 << 40, 1 << 20, None), Region(1 << 41, 4096, None)

PART = nixl_words.part_of(b"meta", POOL)


def words(**changes: Any) -> Introduction:
    said = nixl_words.introduction_of(bytes(16), "prefill-0", b"meta", SHAPE, POOL, LEASES)
    return msgspec.structs.replace(said, **changes)


def said(words: Any) -> list[bytes]:
    return [nixl_words.INTRODUCTION_MAGIC, msgspec.msgpack.encode(words)]


@pytest.mark.parametrize("device", [None, 0, 7])
def test_an_introduction_comes_back_as_it_went(device: int | None) -> None:
    pool = POOL._replace(device=device)
    told = nixl_words.introduction_of(bytes(16), "prefill-0", b"meta", SHAPE, pool, LEASES)
    frames = nixl_words.encode_introduction(told)
    assert nixl_words.is_introduction(frames)
    assert nixl_words.decode_introduction(frames) == told
    assert told.shape == SHAPE
    assert told.device == (nixl_words.HOST if device is None else device)


def test_parts_of_ranks_come_back_in_their_order_and_are_no_first_version() -> None:
    others = [
        nixl_words.part_of(b"meta-%d" % rank, POOL._replace(address=rank << 40, device=rank))
        for rank in (1, 2, 3)
    ]
    told = nixl_words.introduction_of(
        bytes(16), "prefill-0", b"meta", SHAPE, POOL._replace(device=0), LEASES, others
    )
    found = nixl_words.decode_introduction(nixl_words.encode_introduction(told))
    assert found.parts == (nixl_words.part_of(b"meta", POOL._replace(device=0)), *others)
    assert found.version == nixl_words.RANKS_VERSION, "who knows no ranks refuses it"
    assert words().version == nixl_words.VERSION, "who knows no ranks reads it"
    names = [nixl_words.agent_of(found.agent, rank) for rank in range(4)]
    assert len(set(names)) == 4
    assert names[0] == found.agent


def test_a_welcome_comes_back_as_it_went() -> None:
    frames = nixl_words.encode_welcome(Welcome(bytes(16), "no", 1e9, 2e9))
    assert nixl_words.is_welcome(frames)
    assert nixl_words.decode_welcome(frames) == Welcome(bytes(16), "no", 1e9, 2e9)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": 3}, "version 3"),
        ({"version": 2}, "1 parts in an introduction of version 2"),
        ({"others": (PART,)}, "2 parts in an introduction of version 1"),
        ({"others": (), "version": 2}, "others"),
        ({"others": (PART,) * 64, "version": 2}, "others"),
        ({"others": (replace(PART, address=(1 << 62) - 1),), "version": 2}, "where no memory is"),
        ({"others": (replace(PART, metadata=b""),), "version": 2}, "metadata"),
        ({"address": 0}, "address"),
        ({"address": -5}, "address"),
        ({"address": (1 << 62) - 1}, "where no memory is"),
        ({"lease_address": (1 << 62) - 1}, "where no memory is"),
        ({"n_bytes": 1 << 60}, "n_bytes"),
        ({"device": -2}, "device"),
        ({"pool_id": b"short"}, "pool_id"),
        ({"metadata": b""}, "metadata"),
        ({"metadata": bytes(nixl_words.MOST_METADATA_BYTES + 1)}, "metadata"),
        ({"n_blocks": 0}, "n_blocks"),
        ({"worker_id": "x" * 257}, "worker_id"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_what_is_out_of_range_is_refused_by_its_field(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(NixlWordsError, match=told):
        nixl_words.decode_introduction(said(words(**changes)))


@given(st.binary(max_size=300), st.integers(0, 3))
def test_any_bytes_are_words_or_an_error_that_says_so(message: bytes, n_more: int) -> None:
    frames = [b"BKI1", message, *[b""] * n_more]
    for decode in (nixl_words.decode_introduction, nixl_words.decode_welcome):
        with contextlib.suppress(NixlWordsError):
            decode(frames)


@given(st.data())
def test_a_message_with_any_byte_changed_is_words_or_an_error(data: st.DataObject) -> None:
    message = bytearray(said(words())[1])
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(NixlWordsError):
        told = nixl_words.decode_introduction([b"BKI1", bytes(message)])
        assert told.address + told.n_bytes <= 1 << 62
