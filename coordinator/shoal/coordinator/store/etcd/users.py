"""Access control in an etcd that several regions share: a user and a role for each region and federation.

Each role may read and write the keys under its own prefix and nothing else; then authentication is enabled, which
refuses every client without a user. A user is the common name of a client certificate and has no password; its role has
the same name. `root` is etcd's own name for the administrator. What is right already stays, because every change of
users makes etcd refuse the requests in flight at that moment, which are then sent again.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from shoal.coordinator.store.etcd.members import EtcdMember, EtcdMembers, EtcdResponse, end_of
from shoal.coordinator.store.etcd.options import EtcdOptions
from shoal.etcd import etcd_pb2
from shoal.types.codes import Code, refuse
from shoal.wire.identity import store_user_of

ROOT: Final = "root"
CALL_TIMEOUT_S: Final = 20.0
"""Seconds for each answer, because etcd may be starting too."""
_KIND: Final = etcd_pb2.Permission.READWRITE


@dataclass(frozen=True, slots=True)
class Right:
    """A permission on the keys from `key` up to, but excluding, `end`."""

    key: bytes
    end: bytes
    # A value of etcd's Permission.Type.
    kind: int = _KIND


def right_of(prefix: str, scope: str) -> Right:
    key = f"{prefix}/{scope}/".encode()
    return Right(key, end_of(key))


async def authorise(options: EtcdOptions, scopes: Sequence[str]) -> tuple[str, ...]:
    """Sets up users, roles and authentication with root's certificate. Returns the changes in words. Enabling
    authentication is not among them, because etcd does not tell whether it was enabled before.

    scopes: one for each region and federation, as in StoreOptions. Raises ShoalError(FIELD_INVALID | STORE_UNAVAILABLE
    | STORE_DENIED).
    """
    members = EtcdMembers.from_options(options)
    try:
        if members.user != ROOT:  # this client would lock itself out
            raise refuse(
                Code.FIELD_INVALID,
                f"the certificate of {members.user!r:.80}",
                f"that of {ROOT!r}, its common name",
                "--etcd-cert and --etcd-key of etcd's administrator",
            )
        return await _Users(members).ensure(options.prefix, scopes)
    finally:
        await members.close()


class _Users:
    """Users, roles and rights of one etcd, and the changes made to them."""

    def __init__(self, members: EtcdMembers) -> None:
        self._members = members
        self._changed: list[str] = []

    async def ensure(self, prefix: str, scopes: Sequence[str]) -> tuple[str, ...]:
        await self._ensure_role(ROOT)
        await self._ensure_user(ROOT)
        for scope in scopes:
            name = store_user_of(scope)
            await self._ensure_role(name)
            await self._ensure_right(name, right_of(prefix, scope))
            await self._ensure_user(name)
        enable = etcd_pb2.AuthEnableRequest()  # etcd ignores it if authentication is enabled already
        await self._members.call(
            lambda member, limit_s: member.auth.AuthEnable(enable, timeout=limit_s),
            timeout_s=CALL_TIMEOUT_S,
            exact=False,
        )
        return tuple(self._changed)

    async def _ensure_role(self, role: str) -> None:
        if await self._rights(role) is None:
            request = etcd_pb2.AuthRoleAddRequest(name=role)
            await self._change(f"role {role}", lambda member, limit_s: member.auth.RoleAdd(request, timeout=limit_s))

    async def _ensure_right(self, role: str, wanted: Right) -> None:
        """Gives the role this right and takes away every other, because a role with this name is ours."""
        held = await self._rights(role) or frozenset()
        if wanted not in held:  # replaces a right of another kind for the same keys
            permission = etcd_pb2.Permission(permType=_KIND, key=wanted.key, range_end=wanted.end)
            request = etcd_pb2.AuthRoleGrantPermissionRequest(name=role, perm=permission)
            await self._change(
                f"role {role} for {wanted.key.decode()}",
                lambda member, limit_s: member.auth.RoleGrantPermission(request, timeout=limit_s),
            )
        for right in sorted(held, key=lambda right: right.key):
            if (right.key, right.end) != (wanted.key, wanted.end):
                await self._revoke_right(role, right)

    async def _revoke_right(self, role: str, right: Right) -> None:
        request = etcd_pb2.AuthRoleRevokePermissionRequest(role=role, key=right.key, range_end=right.end)
        await self._change(
            f"role {role} no longer for {right.key.decode(errors='replace')}",
            lambda member, limit_s: member.auth.RoleRevokePermission(request, timeout=limit_s),
        )

    async def _ensure_user(self, user: str) -> None:
        """The user has the role of its name and no other. Only root may also have roles that its owner gave it."""
        held = await self._roles(user)
        if held is None:
            add = etcd_pb2.AuthUserAddRequest(name=user, options=etcd_pb2.UserAddOptions(no_password=True))
            await self._change(f"user {user}", lambda member, limit_s: member.auth.UserAdd(add, timeout=limit_s))
        if user not in (held or ()):
            grant = etcd_pb2.AuthUserGrantRoleRequest(user=user, role=user)
            await self._change(
                f"user {user} with role {user}",
                lambda member, limit_s: member.auth.UserGrantRole(grant, timeout=limit_s),
            )
        for role in held or ():
            if user not in (ROOT, role):
                await self._revoke_role(user, role)

    async def _revoke_role(self, user: str, role: str) -> None:
        request = etcd_pb2.AuthUserRevokeRoleRequest(name=user, role=role)
        await self._change(
            f"user {user} no longer with role {role}",
            lambda member, limit_s: member.auth.UserRevokeRole(request, timeout=limit_s),
        )

    async def _rights(self, role: str) -> frozenset[Right] | None:
        """None: no such role."""
        request = etcd_pb2.AuthRoleGetRequest(role=role)
        try:
            found = await self._members.call(
                lambda member, limit_s: member.auth.RoleGet(request, timeout=limit_s),
                timeout_s=CALL_TIMEOUT_S,
                exact=False,
            )
        except grpc.aio.AioRpcError as error:
            if _says(error, "not found"):
                return None
            raise
        return frozenset(Right(each.key, each.range_end, each.permType) for each in found.perm)

    async def _roles(self, user: str) -> tuple[str, ...] | None:
        """None: no such user."""
        request = etcd_pb2.AuthUserGetRequest(name=user)
        try:
            found = await self._members.call(
                lambda member, limit_s: member.auth.UserGet(request, timeout=limit_s),
                timeout_s=CALL_TIMEOUT_S,
                exact=False,
            )
        except grpc.aio.AioRpcError as error:
            if _says(error, "not found"):
                return None
            raise
        return tuple(found.roles)

    async def _change(self, what: str, ask: Callable[[EtcdMember, float], Awaitable[EtcdResponse]]) -> None:
        try:
            await self._members.call(ask, timeout_s=CALL_TIMEOUT_S, exact=False)
        except grpc.aio.AioRpcError as error:  # already done, by an attempt without an answer
            if not _says(error, "already exists", "not granted"):
                raise
        self._changed.append(what)


def _says(error: grpc.aio.AioRpcError, *texts: str) -> bool:
    """True if the error contains one of the texts of etcd's api/v3rpc/rpctypes/error.go."""
    is_of_state = error.code() is grpc.StatusCode.FAILED_PRECONDITION
    return is_of_state and any(text in str(error.details()) for text in texts)
