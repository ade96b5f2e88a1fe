"""Leader election in etcd: a key that lives as long as its holder's lease.

The key says who should act, not who may. A holder that was paused beyond its lease does not know yet that it lost. Its
writes are refused by the term in the region's record, which the next leader has raised.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio

from shoal.coordinator.store.etcd.members import NEEDS_LEADER, TRY_S, EtcdMember, EtcdMembers, at_revision
from shoal.etcd import etcd_pb2
from shoal.types.codes import ShoalError

LEADER_LEASE_S: Final = 2
"""Seconds of the lease. A dead leader is replaced after this, plus the half second between etcd's checks for expired
leases and the start of the next leader."""
RENEW_S: Final = 0.5
POLL_S: Final = 0.25


class EtcdElection:
    """ports.Election. key: the election's. client: this coordinator's name, the same after a restart."""

    is_shared = True

    def __init__(self, members: EtcdMembers, key: str, client: str, candidate: bytes) -> None:
        self._members = members
        self._key = key.encode()
        self._value = client.encode() + b"\n" + candidate
        self._own_prefix = client.encode() + b"\n"
        self._lease = 0

    async def campaign(self) -> None:
        while True:
            with contextlib.suppress(ShoalError):  # etcd does not answer, so nobody is elected for now
                if await self._try_once():
                    return
            await asyncio.sleep(POLL_S)

    async def wait_lost(self) -> None:
        """Returns once leadership is lost. While etcd does not answer the leader stays: nobody else can be elected
        through this etcd, or if one is, a sibling reports it."""
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(ShoalError):
                if not await self._renew():
                    return

    async def leader(self) -> bytes | None:
        held = await self._read_holder()
        return None if held is None else held.value.partition(b"\n")[2]

    async def resign(self) -> None:
        if self._lease:
            with contextlib.suppress(ShoalError, grpc.aio.AioRpcError):
                request = etcd_pb2.LeaseRevokeRequest(ID=self._lease)
                await self._members.call(
                    lambda member, limit_s: member.lease.LeaseRevoke(request, timeout=limit_s),
                    timeout_s=TRY_S,
                    exact=False,
                )
            self._lease = 0

    async def _try_once(self) -> bool:
        held = await self._read_holder()
        if held is not None and not held.value.startswith(self._own_prefix):
            return False
        if held is not None:  # from an earlier run of this coordinator, which now owns the directory alone
            await self._transact(held.mod_revision, _delete(self._key))
        lease = secrets.randbelow(2**62) + 1
        grant = etcd_pb2.LeaseGrantRequest(TTL=LEADER_LEASE_S, ID=lease)
        try:
            await self._members.call(
                lambda member, limit_s: member.lease.LeaseGrant(grant, timeout=limit_s, metadata=NEEDS_LEADER),
                exact=False,
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:  # granted, by an attempt without an answer
                raise
        self._lease = lease
        put = etcd_pb2.PutRequest(key=self._key, value=self._value, lease=lease)
        try:
            await self._transact(0, etcd_pb2.RequestOp(request_put=put))
        except grpc.aio.AioRpcError:  # the lease has expired: this machine was paused
            return False
        held = await self._read_holder()  # the outcome, whatever happened to the attempts
        if held is not None and held.lease == lease:
            return True
        await self.resign()
        return False

    async def _renew(self) -> bool:
        """False if the lease has expired or the key belongs to another coordinator. Raises ShoalError."""
        try:
            answer = await self._members.call(self._keep_alive, timeout_s=TRY_S, exact=False)
        except grpc.aio.AioRpcError:
            return False
        if answer.TTL <= 0:
            return False
        # Also read the key: a restored old copy of etcd may know the lease, and only a read reveals that it is old.
        held = await self._read_holder()
        return held is not None and held.lease == self._lease

    async def _keep_alive(self, member: EtcdMember, limit_s: float) -> etcd_pb2.LeaseKeepAliveResponse:
        call = member.lease.LeaseKeepAlive(_once(self._lease), timeout=limit_s, metadata=NEEDS_LEADER)
        async for answer in call:
            return answer
        nothing, said = grpc.aio.Metadata(), "it ended the stream"
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, said, None)

    async def _read_holder(self) -> etcd_pb2.KeyValue | None:
        found = await self._members.range(etcd_pb2.RangeRequest(key=self._key))
        return found.kvs[0] if found.kvs else None

    async def _transact(self, revision: int, operation: etcd_pb2.RequestOp) -> None:
        await self._members.txn(etcd_pb2.TxnRequest(compare=[at_revision(self._key, revision)], success=[operation]))


def _delete(key: bytes) -> etcd_pb2.RequestOp:
    return etcd_pb2.RequestOp(request_delete_range=etcd_pb2.DeleteRangeRequest(key=key))


async def _once(lease: int) -> AsyncIterator[etcd_pb2.LeaseKeepAliveRequest]:
    yield etcd_pb2.LeaseKeepAliveRequest(ID=lease)
