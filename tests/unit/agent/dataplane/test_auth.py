"""Who a caller is: certificates by role, tokens by digest, judged at each call."""

import hashlib

import pytest

from shoal.agent.dataplane.auth import INFER_ROLES, READ_ROLES, Caller, by_digest, caller_of
from shoal.agent.dataplane.transport import Call
from shoal.types.agreement import GUESTS
from shoal.types.assignment import Credential, PeerTrust
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire.identity import Identity

NOW = Wall(1000.0)
TOKENS = by_digest(
    (
        Credential("acme", hashlib.sha256(b"good").hexdigest(), Wall(2000.0)),
        Credential("acme", hashlib.sha256(b"old").hexdigest(), Wall(999.0)),
    )
)


def identity(role: Role, name: str = "acme", region: str = "west", until: float = 2000.0) -> Identity:
    return Identity(region, role, name, Wall(0.0), Wall(until), "1")


def judge(call: Call, wall: float = NOW, *, read: bool = False) -> Caller | Code:
    try:
        if read:
            return caller_of(call, TOKENS, "west", "n1", Wall(wall), READ_ROLES)
        return caller_of(call, TOKENS, "west", "n1", Wall(wall))
    except ShoalError as error:
        if not error.refusal.remedy:
            raise AssertionError("a refusal says what to do") from error
        return error.code


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Call(), Code.UNAUTHENTICATED),
        (Call(bearer="good"), Caller("acme", Role.TENANT, "acme", 0, "n1")),
        (Call(bearer="good", tenant="acme"), Caller("acme", Role.TENANT, "acme", 0, "n1")),
        (Call(bearer="good", tenant="other"), Code.TENANT_DENIED),
        (Call(bearer="bad"), Code.TOKEN_INVALID),
        (Call(bearer="old"), Code.TOKEN_EXPIRED),
        (Call(identity(Role.TENANT)), Caller("acme", Role.TENANT, "acme", 0, "n1")),
        (Call(identity(Role.TENANT), bearer="bad"), Caller("acme", Role.TENANT, "acme", 0, "n1")),
        (Call(identity(Role.TENANT), tenant="other"), Code.TENANT_DENIED),
        (Call(identity(Role.TENANT), hop=1, origin="x"), Caller("acme", Role.TENANT, "acme", 0, "n1")),
        (Call(identity(Role.TENANT, region="east")), Code.REGION_MISMATCH),
        (Call(identity(Role.TENANT, until=999.0)), Code.CERT_EXPIRED),
        (Call(identity(Role.OPERATOR, "ops")), Caller("default", Role.OPERATOR, "ops", 0, "n1")),
        (Call(identity(Role.OPERATOR, "ops"), tenant="acme"), Caller("acme", Role.OPERATOR, "ops", 0, "n1")),
        (Call(identity(Role.OPERATOR, "ops"), tenant="../x"), Code.NAME_INVALID),
        (Call(identity(Role.VIEWER)), Code.ROLE_DENIED),
        (Call(identity(Role.COORDINATOR)), Code.ROLE_DENIED),
        (Call(identity(Role.FEDERATION)), Code.ROLE_DENIED),
        (Call(identity(Role.AGENT, "n2")), Code.ROLE_DENIED),
        (Call(identity(Role.AGENT, "n2"), hop=1, tenant="acme"), Code.ROLE_DENIED),
        (
            Call(identity(Role.GATEWAY, "g"), hop=1, tenant="acme", origin="g"),
            Caller("acme", Role.GATEWAY, "g", 1, "g"),
        ),
        (Call(identity(Role.AGENT, "n2"), hop=1, tenant="a c", origin="g"), Code.NAME_INVALID),
        (
            Call(identity(Role.GATEWAY, "g"), hop=1, tenant=GUESTS, origin="east", agreement="ag-1"),
            Caller(GUESTS, Role.GATEWAY, "g", 1, "east", agreement="ag-1"),
        ),
        (Call(identity(Role.GATEWAY, "g"), hop=1, tenant=GUESTS, origin="east"), Code.NAME_INVALID),
        (Call(identity(Role.TENANT, GUESTS)), Code.TENANT_DENIED),
    ],
)
def test_who_may_ask_for_what(call: Call, expected: Caller | Code) -> None:
    assert judge(call) == expected


def test_viewers_may_look() -> None:
    assert judge(Call(identity(Role.VIEWER, "eve"), tenant="acme"), read=True) == Caller(
        "acme", Role.VIEWER, "eve", 0, "n1"
    )


def test_a_certificate_ends_on_an_open_connection() -> None:
    call = Call(identity(Role.TENANT, until=1500.0))
    assert isinstance(judge(call, 1499.0), Caller)
    assert judge(call, 1501.0) is Code.CERT_EXPIRED


def east(role: Role = Role.GATEWAY, name: str = "g1", serial: str = "7", until: float = 2000.0) -> Identity:
    return Identity("east", role, name, Wall(0.0), Wall(until), serial)


EAST = {"east": PeerTrust("east", ("pem",), ("g1", "g2"), ("ag-1", "ag-2"), revoked=("13",))}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Call(east(), hop=1, agreement="ag-1"), Caller(GUESTS, Role.GATEWAY, "g1", 1, "east", "east", "ag-1")),
        # What it claims of tenants and origins does not count: it asks as its region, for its agreement.
        (
            Call(east(), hop=1, agreement="ag-2", tenant="acme", origin="n1"),
            Caller(GUESTS, Role.GATEWAY, "g1", 1, "east", "east", "ag-2"),
        ),
        (Call(east(), hop=1, agreement="ag-3"), Code.AGREEMENT_UNKNOWN),
        (Call(east(), hop=1), Code.AGREEMENT_UNKNOWN),
        (Call(east(), agreement="ag-1"), Code.ROLE_DENIED),
        (Call(east(name="g3"), hop=1, agreement="ag-1"), Code.ROLE_DENIED),
        (Call(east(Role.AGENT), hop=1, agreement="ag-1"), Code.ROLE_DENIED),
        (Call(east(Role.OPERATOR), tenant="acme"), Code.ROLE_DENIED),
        (Call(east(serial="13"), hop=1, agreement="ag-1"), Code.CERT_REVOKED),
        (Call(east(until=999.0), hop=1, agreement="ag-1"), Code.CERT_EXPIRED),
        (Call(identity(Role.GATEWAY, "g1", "north"), hop=1, agreement="ag-1"), Code.REGION_MISMATCH),
    ],
)
def test_a_gateway_of_another_region_has_its_agreements_and_nothing_else(call: Call, expected: Caller | Code) -> None:
    for roles in (INFER_ROLES, READ_ROLES):
        try:
            found: Caller | Code = caller_of(call, TOKENS, "west", "n1", NOW, roles, (), EAST)
        except ShoalError as error:
            found = error.code
        assert found == expected


def test_what_another_region_sends_enters_here_and_what_was_forwarded_inside_does_not() -> None:
    foreign = Caller(GUESTS, Role.GATEWAY, "g1", 1, "east", "east", "ag-1")
    inside = Caller(GUESTS, Role.GATEWAY, "g", 1, "east", agreement="ag-1")
    assert (foreign.enters, inside.enters) == (True, False)
