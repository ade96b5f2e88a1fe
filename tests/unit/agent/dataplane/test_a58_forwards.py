"""A58: an agent's certificate forwards a request for a tenant that sent none. What signs a forward inside a region,
and what accepts it."""

import time

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.agent.dataplane.forward_auth import MAX_STAMPS, STAMP_TTL_US, ForwardAuth
from shoal.agent.dataplane.transport import InboundCall
from shoal.types.assignment import Forwarding, Front
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("acme", "ocr")
COST_S = 100e-6
"""Far above what is measured (3 us): a signature in its place would take more."""


class FrontPair:
    """Fronts `e` and `r`, which know each other."""

    def __init__(self) -> None:
        one, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self.wall = 1_800_000_000.0
        self.entry = ForwardAuth("eu", "e", one.private_bytes_raw(), lambda: Wall(self.wall))
        self.receiver = ForwardAuth("eu", "r", other.private_bytes_raw(), lambda: Wall(self.wall))
        self.entry.configure(Forwarding((Front("r", _public(other)),)))
        self.listed = Forwarding((Front("e", _public(one), (KEY,)),))
        self.receiver.configure(self.listed)

    def call(self, **more: str) -> InboundCall:
        given = {"tenant": "acme", "origin": "e", "request_id": "r-1", **more}
        forward = self.entry.sign("r", "acme", "ocr", "e", "r-1", "")
        return InboundCall(**given, hop=1, forward=forward)  # type: ignore[arg-type]


def _public(private: X25519PrivateKey) -> str:
    return private.public_key().public_bytes_raw().hex()


def code_of(work: object) -> Code | None:
    assert callable(work)
    try:
        work()
    except ShoalError as error:
        return error.code
    return None


def test_a58_what_was_signed_is_taken_once() -> None:
    ends = FrontPair()
    call = ends.call()
    assert ends.receiver.check(call, "e", "") == "ocr"
    ends.receiver.check_workload("e", KEY)
    ends.receiver.consume(call, "e")
    assert code_of(lambda: ends.receiver.consume(call, "e")) is Code.MESSAGE_REPLAYED
    assert code_of(lambda: ends.receiver.check_workload("e", WorkloadKey("acme", "x"))) is Code.FORWARD_DENIED
    assert code_of(lambda: ends.receiver.check(ends.call(tenant="x"), "e", "")) is Code.FORWARD_DENIED
    assert code_of(lambda: ends.receiver.check(ends.call(), "e", "beside")) is Code.FORWARD_DENIED
    assert code_of(lambda: ends.receiver.check(ends.call(), "x", "")) is Code.FORWARD_DENIED


@pytest.mark.parametrize("text", ["", ";", "x;ocr;", "1;ocr;", "1;ocr;\u00e9", "9" * 30 + ";ocr;00", "\u0661;ocr;00"])
def test_a58_what_is_no_proof_is_refused(text: str) -> None:
    call = InboundCall(tenant="acme", origin="e", request_id="r-1", hop=1, forward=text)
    assert code_of(lambda: FrontPair().receiver.check(call, "e", "")) is Code.FORWARD_DENIED


def test_a58_forwards_that_overtake_each_other_are_all_taken_and_memory_is_bounded() -> None:
    ends = FrontPair()
    first = ends.call()
    calls = [ends.call() for _ in range(MAX_STAMPS + 10)]
    for call in reversed(calls[:100]):
        ends.receiver.consume(call, "e")
    for call in calls[100:]:
        ends.receiver.consume(call, "e")
    assert len(ends.receiver._peers["e"].used_stamps) <= MAX_STAMPS
    assert code_of(lambda: ends.receiver.consume(first, "e")) is Code.MESSAGE_REPLAYED, "older than what is remembered"
    assert code_of(lambda: ends.receiver.consume(calls[-1], "e")) is Code.MESSAGE_REPLAYED


def test_a58_an_old_forward_is_refused_and_a_clock_that_steps_back_stops_nobody() -> None:
    ends = FrontPair()
    early = ends.call()
    ends.wall += STAMP_TTL_US / 1e6 + 1.0
    ends.receiver.consume(ends.call(), "e")
    assert code_of(lambda: ends.receiver.consume(early, "e")) is Code.MESSAGE_REPLAYED
    ends.wall = 0.0
    ends.receiver.consume(ends.call(), "e")


def test_a58_a_new_list_forgets_no_stamp_and_drops_who_is_left_out() -> None:
    ends = FrontPair()
    call = ends.call()
    ends.receiver.consume(call, "e")
    more = Forwarding((*ends.listed.fronts, Front("z", "", (KEY,))))
    ends.receiver.configure(more)
    assert code_of(lambda: ends.receiver.consume(call, "e")) is Code.MESSAGE_REPLAYED
    ends.receiver.check_workload("z", KEY)
    assert ends.receiver.check(InboundCall(tenant="acme", hop=1), "z", "") == "", (
        "of an earlier version, which signs nothing"
    )
    ends.receiver.configure(Forwarding())
    assert code_of(lambda: ends.receiver.check(ends.call(), "e", "")) is Code.FORWARD_DENIED
    ends.receiver.configure(None)
    assert ends.receiver.check(InboundCall(hop=1), "e", "") == "", "a coordinator that does not tell"


def test_a58_a_list_that_could_not_be_applied_is_not_taken_for_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is told it again applies it; until then the list before it counts."""
    ends = FrontPair()
    after = Forwarding((Front("z", _public(X25519PrivateKey.generate()), (KEY,)),))

    def fail(*_: bytes) -> bytes:
        raise RuntimeError("not supported")

    with monkeypatch.context() as patch:
        patch.setattr(ends.receiver, "_exchange", fail)
        with pytest.raises(RuntimeError):
            ends.receiver.configure(after)
    assert ends.receiver.check(ends.call(), "e", "") == "ocr"
    ends.receiver.configure(after)
    ends.receiver.check_workload("z", KEY)
    assert code_of(lambda: ends.receiver.check(ends.call(), "e", "")) is Code.FORWARD_DENIED


def test_a58_a_key_of_another_length_is_no_key() -> None:
    with pytest.raises(ValueError, match="31 bytes"):
        ForwardAuth("eu", "e", bytes(31), lambda: Wall(0.0))


def test_a58_what_a_listed_agent_asks_for_itself_is_signed_too() -> None:
    ends = FrontPair()
    signed = InboundCall(forward=ends.entry.sign("r", "", "", "", "", "Offer"))
    ends.receiver.check_own(signed, "e", "Offer")
    for call, method in ((signed, "Commit"), (InboundCall(), "Offer"), (ends.call(), "Offer")):
        assert (
            code_of(lambda call=call, method=method: ends.receiver.check_own(call, "e", method)) is Code.FORWARD_DENIED
        )
    ends.receiver.check_own(InboundCall(), "left", "Commit")  # whether it may, the moves say


def test_a58_a_key_that_is_none_signs_nothing_that_counts() -> None:
    for key in ("zz", "00" * 32, "00"):
        receiver = ForwardAuth("eu", "r", X25519PrivateKey.generate().private_bytes_raw(), lambda: Wall(1.0))
        receiver.configure(Forwarding((Front("e", key, (KEY,)),)))
        assert code_of(lambda front=receiver: front.check(InboundCall(hop=1), "e", "")) is Code.FORWARD_DENIED


def test_a58_both_derive_what_fronts_of_earlier_versions_do() -> None:
    """X25519, and HKDF by the cryptography library, over the region."""
    one, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    derived = HKDF(hashes.SHA256(), 32, salt=None, info=b"shoal forward 1eu").derive(one.exchange(other.public_key()))
    for private, peer in ((one, other), (other, one)):
        front = ForwardAuth("eu", "e", private.private_bytes_raw(), lambda: Wall(1.0))
        front.configure(Forwarding((Front("r", _public(peer)),)))
        assert front._secrets == {_public(peer): derived}


def test_a58_a_front_with_another_key_begins_anew_and_its_old_secret_is_dropped() -> None:
    ends = FrontPair()
    call = ends.call()
    ends.receiver.consume(call, "e")
    second = X25519PrivateKey.generate()
    ends.receiver.configure(Forwarding((Front("e", _public(second), (KEY,)),)))
    assert ends.receiver._secrets.keys() == {_public(second)}
    assert code_of(lambda: ends.receiver.check(call, "e", "")) is Code.FORWARD_DENIED, "by the key before"
    assert ends.receiver._peers["e"].used_stamps == []


def test_a58_it_costs_microseconds() -> None:
    ends, count = FrontPair(), 2000
    began = time.thread_time()
    for _ in range(count):
        call = ends.call()
        ends.receiver.check(call, "e", "")
        ends.receiver.consume(call, "e")
    each = (time.thread_time() - began) / count
    assert each < COST_S, f"{each * 1e6:.1f} us"
