"""Who a caller is: certificates by role, tokens by digest, judged at each call."""

import hashlib

import pytest

from shoal.agent.dataplane.auth import INFER_ROLES, READ_ROLES, Caller, by_digest, caller_of
from shoal.agent.dataplane.transport import InboundCall
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Credential, PeerTrust
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Wall

NOW = Wall(1000.0)
TOKENS = by_digest(
    (
        Credential("acme", hashlib.sha256(b"good").hexdigest(), Wall(2000.0)),
        Credential("acme", hashlib.sha256(b"old").hexdigest(), Wall(999.0)),
    )
)


def identity(role: Role, name: str = "acme", region: str = "west", until: float = 2000.0) -> Identity:
    return Identity(region, role, name, Wall(0.0), Wall(until), "1")


def authenticate(call: InboundCall, wall: float = NOW, *, read: bool = False) -> Caller | Code:
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
        (InboundCall(), Code.UNAUTHENTICATED),
        (InboundCall(bearer="good"), Caller("acme", Role.TENANT, "acme", 0, "n1")),
        (InboundCall(bearer="good", tenant="acme"), Caller("acme", Role.TENANT, "acme", 0, "n1")),
        (InboundCall(bearer="good", tenant="other"), Code.TENANT_DENIED),
        (InboundCall(bearer="bad"), Code.TOKEN_INVALID),
        (InboundCall(bearer="old"), Code.TOKEN_EXPIRED),
        (InboundCall(identity(Role.TENANT)), Caller("acme", Role.TENANT, "acme", 0, "n1")),
        (InboundCall(identity(Role.TENANT), bearer="bad"), Caller("acme", Role.TENANT, "acme", 0, "n1")),
        (InboundCall(identity(Role.TENANT), tenant="other"), Code.TENANT_DENIED),
        (InboundCall(identity(Role.TENANT), hop=1, origin="x"), Caller("acme", Role.TENANT, "acme", 0, "n1")),
        (InboundCall(identity(Role.TENANT, region="east")), Code.REGION_MISMATCH),
        (InboundCall(identity(Role.TENANT, until=999.0)), Code.CERT_EXPIRED),
        (InboundCall(identity(Role.OPERATOR, "ops")), Caller("default", Role.OPERATOR, "ops", 0, "n1")),
        (InboundCall(identity(Role.OPERATOR, "ops"), tenant="acme"), Caller("acme", Role.OPERATOR, "ops", 0, "n1")),
        (InboundCall(identity(Role.OPERATOR, "ops"), tenant="../x"), Code.NAME_INVALID),
        (InboundCall(identity(Role.VIEWER)), Code.ROLE_DENIED),
        (InboundCall(identity(Role.COORDINATOR)), Code.ROLE_DENIED),
        (InboundCall(identity(Role.FEDERATION)), Code.ROLE_DENIED),
        (InboundCall(identity(Role.AGENT, "n2")), Code.ROLE_DENIED),
        (InboundCall(identity(Role.AGENT, "n2"), hop=1, tenant="acme"), Code.ROLE_DENIED),
        (
            InboundCall(identity(Role.GATEWAY, "g"), hop=1, tenant="acme", origin="g"),
            Caller("acme", Role.GATEWAY, "g", 1, "g"),
        ),
        (InboundCall(identity(Role.AGENT, "n2"), hop=1, tenant="a c", origin="g"), Code.NAME_INVALID),
        (
            InboundCall(identity(Role.GATEWAY, "g"), hop=1, tenant=GUEST_TENANT, origin="east", agreement="ag-1"),
            Caller(GUEST_TENANT, Role.GATEWAY, "g", 1, "east", agreement="ag-1"),
        ),
        (InboundCall(identity(Role.GATEWAY, "g"), hop=1, tenant=GUEST_TENANT, origin="east"), Code.NAME_INVALID),
        (InboundCall(identity(Role.TENANT, GUEST_TENANT)), Code.TENANT_DENIED),
    ],
)
def test_who_may_ask_for_what(call: InboundCall, expected: Caller | Code) -> None:
    assert authenticate(call) == expected


def test_viewers_may_look() -> None:
    assert authenticate(InboundCall(identity(Role.VIEWER, "eve"), tenant="acme"), read=True) == Caller(
        "acme", Role.VIEWER, "eve", 0, "n1"
    )


def test_a_certificate_ends_on_an_open_connection() -> None:
    call = InboundCall(identity(Role.TENANT, until=1500.0))
    assert isinstance(authenticate(call, 1499.0), Caller)
    assert authenticate(call, 1501.0) is Code.CERT_EXPIRED


def east(role: Role = Role.GATEWAY, name: str = "g1", serial: str = "7", until: float = 2000.0) -> Identity:
    return Identity("east", role, name, Wall(0.0), Wall(until), serial)


EAST = {"east": PeerTrust("east", ("pem",), ("g1", "g2"), ("ag-1", "ag-2"), revoked=("13",))}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            InboundCall(east(), hop=1, agreement="ag-1"),
            Caller(GUEST_TENANT, Role.GATEWAY, "g1", 1, "east", "east", "ag-1"),
        ),
        # What it claims of tenants and origins does not count: it asks as its region, for its agreement.
        (
            InboundCall(east(), hop=1, agreement="ag-2", tenant="acme", origin="n1"),
            Caller(GUEST_TENANT, Role.GATEWAY, "g1", 1, "east", "east", "ag-2"),
        ),
        (InboundCall(east(), hop=1, agreement="ag-3"), Code.AGREEMENT_UNKNOWN),
        (InboundCall(east(), hop=1), Code.AGREEMENT_UNKNOWN),
        (InboundCall(east(), agreement="ag-1"), Code.ROLE_DENIED),
        (InboundCall(east(name="g3"), hop=1, agreement="ag-1"), Code.ROLE_DENIED),
        (InboundCall(east(Role.AGENT), hop=1, agreement="ag-1"), Code.ROLE_DENIED),
        (InboundCall(east(Role.OPERATOR), tenant="acme"), Code.ROLE_DENIED),
        (InboundCall(east(serial="13"), hop=1, agreement="ag-1"), Code.CERT_REVOKED),
        (InboundCall(east(until=999.0), hop=1, agreement="ag-1"), Code.CERT_EXPIRED),
        (InboundCall(identity(Role.GATEWAY, "g1", "north"), hop=1, agreement="ag-1"), Code.REGION_MISMATCH),
    ],
)
def test_a_gateway_of_another_region_has_its_agreements_and_nothing_else(
    call: InboundCall, expected: Caller | Code
) -> None:
    for roles in (INFER_ROLES, READ_ROLES):
        try:
            found: Caller | Code = caller_of(call, TOKENS, "west", "n1", NOW, roles, (), EAST)
        except ShoalError as error:
            found = error.code
        assert found == expected


def test_what_another_region_sends_enters_here_and_what_was_forwarded_inside_does_not() -> None:
    foreign = Caller(GUEST_TENANT, Role.GATEWAY, "g1", 1, "east", "east", "ag-1")
    inside = Caller(GUEST_TENANT, Role.GATEWAY, "g", 1, "east", agreement="ag-1")
    assert {foreign.payer, inside.payer} == {"guests/east"}, "guests count by region"
    assert (foreign.is_ingress, inside.is_ingress) == (True, False)
