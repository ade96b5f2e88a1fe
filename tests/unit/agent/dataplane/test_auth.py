"""Who a caller is: certificates by role, tokens by digest, judged at each call."""

import hashlib

import pytest

from shoal.agent.dataplane.auth import READ_ROLES, Caller, by_digest, caller_of
from shoal.agent.dataplane.transport import Call
from shoal.types.assignment import Credential
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
