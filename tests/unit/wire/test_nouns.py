"""Every noun survives the wire unchanged; what is no noun is refused."""

import math
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import device, node, receipt
from shoal.types import link
from shoal.types.assignment import DesiredSet, Observed, Phase, Status, Version
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.profile import ModelProfile
from shoal.types.receipt import Receipt
from shoal.types.units import Bytes, Wall
from shoal.types.workload import WorkloadKey
from shoal.v1 import link_pb2, nouns_pb2, operator_pb2
from shoal.wire import nouns

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
st.register_type_strategy(float, NUMBERS)
st.register_type_strategy(int, st.integers(min_value=0, max_value=2**31 - 1))
st.register_type_strategy(str, st.text(max_size=20).filter(lambda text: "\0" not in text))

KINDS: tuple[Any, ...] = (
    DesiredSet,
    Status,
    Receipt,
    ModelProfile,
    link.Hello,
    link.Welcome,
    link.NodeEvents,
    link.Refused,
)
REPLICA = Observed(
    *("a-1", WorkloadKey("t", "w"), "sha256:x", "cpu0", Phase.READY, Wall(1.0), None, "", None, None, 0, 0, None, ())
)
STATUS = Status("a", 1, 1, True, Version("h", 1, 1), (), (), (), (), Wall(1.0), True)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_round_trip(kind: Any) -> None:
    @settings(max_examples=40, deadline=None)
    @given(st.from_type(kind))
    def holds(noun: Any) -> None:
        assert nouns.decode(kind, nouns.encode(noun)) == noun
        assert nouns.encode(nouns.decode(kind, nouns.encode(noun))) == nouns.encode(noun)

    holds()


def message_of(status: Status) -> link_pb2.FromAgent:
    return link_pb2.FromAgent.FromString(nouns.from_agent_to_wire(status).SerializeToString())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_session_that_repeats_itself_is_read_as_if_it_did_not(data: st.DataObject) -> None:
    replicas = data.draw(st.lists(st.from_type(Observed), min_size=1, max_size=4))
    versions = data.draw(st.lists(st.from_type(Version), min_size=1, max_size=2))
    reader, told = nouns.SessionReader(), data.draw(st.from_type(Status))
    for _ in range(data.draw(st.integers(1, 5))):
        observed = tuple(data.draw(st.lists(st.sampled_from(replicas), max_size=5)))
        version, full = data.draw(st.sampled_from([None, *versions])), data.draw(st.booleans())
        message = message_of(replace(told, observed=observed, version=version, full=full))
        assert reader.read(message) == nouns.from_agent_from_wire(message)


def test_what_the_full_status_before_told_is_not_read_again() -> None:
    reader, told = nouns.SessionReader(), replace(STATUS, full=True, observed=(REPLICA,))
    first, again = reader.read(message_of(told)), reader.read(message_of(replace(told, sequence=2)))
    assert isinstance(first, Status)
    assert isinstance(again, Status)
    assert (again.sequence, again.observed) == (2, first.observed)
    assert again.observed[0] is first.observed[0]
    assert again.version is first.version
    reader.read(message_of(replace(told, observed=(replace(REPLICA, assignment="a-2"),))))
    later = reader.read(message_of(told))
    assert isinstance(later, Status)
    assert later.observed[0] is not first.observed[0], "no more is held than one status told"


def test_a_session_is_bound_as_each_message_is() -> None:
    reader = nouns.SessionReader()
    reader.read(message_of(replace(STATUS, full=True, observed=(REPLICA,))))
    broken = message_of(replace(STATUS, full=True, observed=(replace(REPLICA, reason="x" * (nouns.MAX_TEXT + 1)),)))
    crowd = link_pb2.FromAgent()
    crowd.status.full = True
    for _ in range(nouns.MAX_ITEMS_BY_FIELD["Status.observed"] + 1):
        crowd.status.observed.add()
    for message in (broken, broken, crowd, link_pb2.FromAgent()):
        with pytest.raises(ShoalError) as caught:
            reader.read(message)
        assert caught.value.code is Code.MESSAGE_INVALID


@dataclass(frozen=True)
class Happening:
    """A value that shares some of its fields with the view `Event`."""

    code: Code
    at: float | None
    workload: WorkloadKey | None
    secret: dict[Any, Any]


def test_a_view_gets_the_fields_that_it_shares_with_a_value() -> None:
    value = Happening(Code.CONFLICT, 1.5, WorkloadKey("acme", "reader"), {})
    view = nouns.fill_view(operator_pb2.Event(actor="kept"), value)
    key = nouns_pb2.WorkloadKey(tenant="acme", name="reader")
    assert view == operator_pb2.Event(code="CONFLICT", at=1.5, workload=key, actor="kept")


def test_what_is_unknown_is_absent_from_a_view() -> None:
    view = nouns.fill_view(operator_pb2.Event(), Happening(Code.CONFLICT, None, None, {}))
    assert view == operator_pb2.Event(code="CONFLICT")
    assert not view.HasField("workload")


def test_every_link_message_has_its_place() -> None:
    for union, message in ((link.FromAgent, link_pb2.FromAgent), (link.ToAgent, link_pb2.ToAgent)):
        fields = {field.message_type.name for field in message.DESCRIPTOR.fields if field.message_type is not None}
        assert fields == {kind.__name__ for kind in get_args(union)}


def test_messages_mirror_nouns_field_by_field() -> None:
    for kind in (*KINDS, *get_args(link.FromAgent), *get_args(link.ToAgent)):
        message = nouns.message_class(kind)
        assert {field.name for field in message.DESCRIPTOR.fields} == set(kind.__dataclass_fields__), kind


@pytest.mark.parametrize(
    "message",
    [
        nouns_pb2.Device(name="cpu0", kind="toaster"),
        nouns_pb2.Device(name="cpu0", kind="cpu", time_scale=math.inf),
        nouns_pb2.Device(name="x" * 5000, kind="cpu"),
        nouns_pb2.Device(name="a\0b", kind="cpu"),
    ],
    ids=["enum", "infinite", "long", "nul"],
)
def test_what_is_no_noun_is_refused(message: nouns_pb2.Device) -> None:
    from shoal.types.device import Device

    with pytest.raises(ShoalError) as caught:
        nouns.from_wire(Device, message)
    assert caught.value.code is Code.MESSAGE_INVALID


def test_f41_what_a_newer_version_added_is_passed_over() -> None:
    """A field, and a code, that this one does not know: neither costs the message that they came in."""
    known = link.Refused(Refusal(Code.CONFLICT, "found", "asked", "remedy"), fatal=True)
    field_999 = b"\xba\x3e\x03new"
    assert nouns.decode(link.Refused, nouns.encode(known) + field_999) == known
    newer = link_pb2.Refused(refusal=nouns_pb2.Refusal(code="LATER_REASON", found="why, in words"), fatal=True)
    read = nouns.from_wire(link.Refused, newer)
    assert read.refusal == Refusal(Code.CODE_UNKNOWN, "why, in words")
    with pytest.raises(ShoalError):
        nouns.from_wire(link.Refused, link_pb2.Refused(refusal=nouns_pb2.Refusal(code="no code at all"), fatal=True))


def test_a_receipt_of_an_older_agent_tells_no_memory_of_the_provider() -> None:
    on = device()
    made = replace(receipt(node("a", on), on), provider_bytes=Bytes(800), provider_host_bytes=Bytes(500))
    sent = nouns_pb2.Receipt.FromString(nouns.encode(made))
    assert nouns.from_wire(Receipt, sent) == made
    sent.ClearField("provider_bytes")
    sent.ClearField("provider_host_bytes")
    older = nouns.from_wire(Receipt, sent)
    assert (older.provider_bytes, older.provider_host_bytes) == (0, 0)


def test_missing_parts_and_junk_are_refused() -> None:
    for broken in (link_pb2.FromAgent(), link_pb2.FromAgent(hello=link_pb2.Hello(nonce="n"))):
        with pytest.raises(ShoalError) as caught:
            nouns.from_agent_from_wire(broken)
        assert caught.value.code is Code.MESSAGE_INVALID
    with pytest.raises(ShoalError):
        nouns.decode(Receipt, b"\xff\xff\xff")
