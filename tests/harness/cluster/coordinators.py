"""Three real coordinators of one region over one etcd, and a client whose writes are counted."""

import itertools
import os
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc

from harness.cluster.coordinator import REGION, CoordinatorServer, operator
from harness.measure.contention import RunDelay
from harness.measure.history import CallHistory, CallOutcome, HistoryVerdict, check_histories
from harness.ports import free_ports
from harness.servers.etcd import Etcd
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.units import Seconds
from shoal.v1 import operator_pb2
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.member_files import Enrolled

LEADS_WITHIN_S = 30.0


class CoordinatorAddress(Protocol):
    """A coordinator: host:port."""

    @property
    def link(self) -> str: ...


class Coordinators(Protocol):
    """The coordinators of a region, and credentials that they accept."""

    @property
    def members(self) -> Sequence[CoordinatorAddress]: ...

    @property
    def admin(self) -> Enrolled: ...

    def leader(self) -> CoordinatorAddress: ...


class CoordinatorCluster:
    def __init__(self, folder: Path, cluster: Etcd, count: int = 3) -> None:
        self.cluster = cluster
        self.shared = folder / "shared"
        self.members = [CoordinatorServer(folder / f"c{number}") for number in range(count)]
        ports = iter(free_ports(2 * count))
        for each in self.members:
            each.folder.mkdir(parents=True)
            each.link, each.enrol = (f"127.0.0.1:{next(ports)}" for _ in range(2))

    def start(self) -> None:
        """Returns when one coordinator leads and all answer."""
        with ThreadPoolExecutor() as together:
            list(together.map(self.start_one, self.members))
        self.admin = FileAuthority.open(
            self.shared / "ca", REGION, wall=CoordinatorClock().wall(), may_create=False
        ).enrol_self(Role.OPERATOR, "tester", lifetime_s=Seconds(3600.0), wall=CoordinatorClock().wall())
        self.leader()

    def start_one(self, coordinator: CoordinatorServer) -> None:
        links, enrols = (",".join(getattr(each, use) for each in self.members) for use in ("link", "enrol"))
        shared = ("--shared-dir", str(self.shared), "--links", links, "--enrols", enrols)
        coordinator.start(flags=(*self.cluster.flags, *shared))

    def stop(self) -> None:
        for each in self.members:
            if each.process is not None:
                each.end()

    def leader(self) -> CoordinatorServer:
        """The coordinator that reports itself as leader."""
        leading = wait_until(self._find_leader, LEADS_WITHIN_S, "a coordinator leads")
        assert leading is not None
        return leading

    def run_delay(self) -> RunDelay:
        """Of all that run, of etcd, and of who writes to them."""
        processes = [*(each.process for each in self.members), *(each.process for each in self.cluster.members)]
        return RunDelay(os.getpid(), *(process.pid for process in processes if process is not None))

    def term(self, coordinator: CoordinatorServer) -> int:
        return int(who_am_i(coordinator, self.admin).term)

    def _find_leader(self) -> CoordinatorServer | None:
        for each in self.members:
            if each.process is not None and each.process.poll() is None:
                try:
                    if not who_am_i(each, self.admin).follows:
                        return each
                except grpc.RpcError:
                    continue
        return None


def who_am_i(coordinator: CoordinatorAddress, admin: Enrolled) -> operator_pb2.WhoAmIReply:
    return operator(coordinator.link, admin).WhoAmI(operator_pb2.WhoAmIRequest(), timeout=1.0)


@dataclass
class TokenWriter:
    """Creates tokens one after another, each with its own name, at any coordinator that accepts, until stopped."""

    # The cluster to write to.
    coordinators: Coordinators
    # Every write: request, outcome, start and end.
    history: CallHistory = field(default_factory=CallHistory)
    # Monotonic seconds of each acknowledged write.
    acknowledged_at: list[float] = field(default_factory=list)
    # Codes of all writes that failed.
    codes: set[Code] = field(default_factory=set)
    # Prefix of its tokens' names; no other writer uses it, whether of an earlier test or of another process.
    prefix: str = field(default_factory=lambda: f"w{secrets.token_hex(4)}-")
    # Set to end the thread.
    _stopping: threading.Event = field(default_factory=threading.Event)
    # Writes until stopped; None before.
    _thread: threading.Thread | None = None

    def __enter__(self) -> "TokenWriter":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.wait_for_more(5)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        assert self._thread is not None
        self._thread.join()

    def wait_for_more(self, count: int = 1, within_s: float = 30.0) -> float:
        """Seconds from the last acknowledgement before this call to the first one after it."""
        before = len(self.acknowledged_at)
        wait_until(lambda: len(self.acknowledged_at) >= before + count, within_s, f"{count} more writes acknowledged")
        return self.acknowledged_at[before] - (
            self.acknowledged_at[before - 1] if before else self.acknowledged_at[before]
        )

    def longest_pause(self) -> float:
        return max(after - before for before, after in itertools.pairwise(self.acknowledged_at))

    def silent_s(self) -> float:
        return _now() - self.acknowledged_at[-1]

    def now(self) -> float:
        return _now()

    def first_acknowledged_after(self, moment: float) -> float:
        """When the first write after `moment` was acknowledged."""
        return next(each for each in self.acknowledged_at if each >= moment)

    def verdict(self) -> HistoryVerdict:
        """Every acknowledged token exists once; none that was certainly refused exists."""
        leader = operator(self.coordinators.leader().link, self.coordinators.admin)
        tokens = leader.Get(operator_pb2.GetRequest(kind="tokens"), timeout=20.0).tokens
        found = sorted(token.name for token in tokens if token.name.startswith(self.prefix))
        twice = {name for name in found if found.count(name) > 1}
        assert not twice, f"written twice: {twice}"
        refused = {done.request: done.detail for done in self.history.completed if done.outcome is CallOutcome.REFUSED}
        there = {asked: told for asked, told in refused.items() if asked in found}
        assert not there, f"refused, and there all the same: {there}"
        return check_histories([self.history], lambda asked: asked if asked in found else None)

    def _run(self) -> None:
        stubs = {each.link: operator(each.link, self.coordinators.admin) for each in self.coordinators.members}
        addresses = list(stubs)
        for number in itertools.count():
            if self._stopping.is_set():
                return
            name = f"{self.prefix}{number}"
            call = self.history.begin(name, _now())
            request = operator_pb2.CreateTokenRequest(role="agent", name=name, valid_s=3600.0)
            try:
                stubs[addresses[0]].CreateToken(request, timeout=6.0)
            except grpc.RpcError as error:
                refusal = refusal_of(error)
                self.codes.add(refusal.code)
                sure = refusal.code in (Code.NOT_LEADER, Code.STORE_FULL) or (
                    refusal.code is Code.STORE_UNAVAILABLE and "not known" not in refusal.found
                )
                told = f"{refusal.code}: {refusal.found}"
                self.history.end(call, CallOutcome.REFUSED if sure else CallOutcome.UNKNOWN, told, _now())
                addresses.append(addresses.pop(0))
                self._stopping.wait(0.02)
                continue
            self.history.end(call, CallOutcome.OK, name, _now())
            self.acknowledged_at.append(_now())


def _now() -> float:
    return time.monotonic()  # noqa: TID251 - the tests' own clock
