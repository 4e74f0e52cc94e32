"""Control messages survive encoding over the whole range of every field."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.records.control import decode_control, encode_control
from baton_worker.records.control_types import (
    AbortNotice,
    Ack,
    Bye,
    CommandFrame,
    Control,
    ErrorNotice,
    Hello,
    Resume,
    Welcome,
    Who,
)
from baton_worker.records.layout import CONTROL_BYTES, MessageType
from baton_worker.records.prefix import peek_type

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
BODY = st.binary(max_size=200)


@st.composite
def welcomes(draw: st.DrawFn) -> Welcome:
    commands_next, expected = draw(U64), draw(U64)
    resendable = draw(st.integers(0, min(commands_next, 2**32 - 1)))
    credit = draw(st.integers(0, min(2**64 - 1 - expected, 2**32 - 1)))
    oldest = commands_next - resendable
    return Welcome(
        draw(U64),
        commands_next,
        oldest,
        expected,
        expected + credit,
        draw(U64),
        draw(U32),
        draw(BODY),
    )


ANY = st.one_of(
    st.builds(Hello, U64, U64, U64, U64, U32, BODY),
    welcomes(),
    st.builds(Ack, U64, U64, U64, U64, U64),
    st.builds(Resume, U64, U64, U64),
    st.builds(Who, U64, U64),
    st.builds(AbortNotice, U64, U64, U64, U32),
    st.builds(Bye, U64, U64),
    st.builds(ErrorNotice, U64, U64, U64, U64, st.text(st.characters(codec="utf-8"), max_size=50)),
    st.builds(CommandFrame, U64, U64, BODY),
)
TYPE_OF = {
    Hello: MessageType.HELLO,
    Welcome: MessageType.WELCOME,
    Ack: MessageType.ACK,
    Resume: MessageType.RESUME,
    Who: MessageType.WHO,
    AbortNotice: MessageType.ABORT,
    Bye: MessageType.BYE,
    ErrorNotice: MessageType.ERROR,
    CommandFrame: MessageType.COMMAND,
}


@given(message=ANY)
def test_decode_inverts_encode(message: Control) -> None:
    frame = encode_control(message)
    assert decode_control(frame) == message
    assert peek_type(frame) is TYPE_OF[type(message)]


@given(message=ANY, offset=st.integers(1, 8))
def test_control_frames_decode_at_any_alignment(message: Control, offset: int) -> None:
    shifted = memoryview(bytes(offset) + encode_control(message))[offset:]
    assert decode_control(shifted) == message


@pytest.mark.parametrize(
    "message", [Ack(1, 2, 3, 4, 5), Resume(1, 2, 3), Who(1, 2), AbortNotice(1, 2, 3, 4), Bye(1, 2)]
)
def test_messages_without_a_body_are_64_bytes(message: Control) -> None:
    assert len(encode_control(message)) == CONTROL_BYTES


def test_every_type_but_step_is_a_control_message() -> None:
    assert set(TYPE_OF.values()) == set(MessageType) - {MessageType.STEP}
