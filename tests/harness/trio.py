"""Three real coordinators of one region over one etcd, and a client whose writes are counted."""

import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc

from harness.coordinator import REGION, Coordinator, operator
from harness.etcd import Etcd
from harness.history import History, Outcome, Verdict, judge
from harness.ports import free_ports
from harness.wait import wait_until
from shoal.coordinator.clock import SystemClock
from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.units import Seconds
from shoal.v1 import operator_pb2
from shoal.wire.enrol import Enrolled
from shoal.wire.status import refusal_of

LEADS_WITHIN_S = 30.0


class Place(Protocol):
    """A coordinator: host:port."""

    @property
    def link(self) -> str: ...


class Coordinators(Protocol):
    """The coordinators of a region, and whom they let in."""

    @property
    def members(self) -> Sequence[Place]: ...

    @property
    def admin(self) -> Enrolled: ...

    def leader(self) -> Place: ...


class Trio:
    def __init__(self, folder: Path, cluster: Etcd, count: int = 3) -> None:
        self.cluster = cluster
        self.shared = folder / "shared"
        self.members = [Coordinator(folder / f"c{number}") for number in range(count)]
        ports = iter(free_ports(2 * count))
        for each in self.members:
            each.folder.mkdir(parents=True)
            each.link, each.enrol = (f"127.0.0.1:{next(ports)}" for _ in range(2))

    def start(self) -> None:
        """Returns when one leads and all answer."""
        with ThreadPoolExecutor() as together:
            list(together.map(self.start_one, self.members))
        self.admin = FileAuthority.open(
            self.shared / "ca", REGION, wall=SystemClock().wall(), may_create=False
        ).enrol_self(Role.OPERATOR, "tester", lifetime_s=Seconds(3600.0), wall=SystemClock().wall())
        self.leader()

    def start_one(self, coordinator: Coordinator) -> None:
        links, enrols = (",".join(getattr(each, use) for each in self.members) for use in ("link", "enrol"))
        shared = ("--shared-dir", str(self.shared), "--links", links, "--enrols", enrols)
        coordinator.start(flags=(*self.cluster.flags, *shared))

    def stop(self) -> None:
        for each in self.members:
            if each.process is not None:
                each.end()

    def leader(self) -> Coordinator:
        """The one that says of itself that it leads."""
        leading = wait_until(self._leading, LEADS_WITHIN_S, "a coordinator leads")
        assert leading is not None
        return leading

    def term(self, coordinator: Coordinator) -> int:
        return int(who(coordinator, self.admin).term)

    def _leading(self) -> Coordinator | None:
        for each in self.members:
            if each.process is not None and each.process.poll() is None:
                try:
                    if not who(each, self.admin).follows:
                        return each
                except grpc.RpcError:
                    continue
        return None


def who(coordinator: Place, admin: Enrolled) -> operator_pb2.WhoAmIReply:
    return operator(coordinator.link, admin).WhoAmI(operator_pb2.WhoAmIRequest(), timeout=1.0)


@dataclass
class Writer:
    """Makes one token after another, each of its own name, at whichever coordinator takes it, until stopped."""

    trio: Coordinators
    history: History = field(default_factory=History)
    acknowledged: list[float] = field(default_factory=list)
    """When."""
    codes: set[Code] = field(default_factory=set)
    prefix: str = field(default_factory=lambda: f"w{secrets.token_hex(4)}-")
    """Of its tokens' names: no other writer's, of a test before or of another process."""
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Writer":
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
        before = len(self.acknowledged)
        wait_until(lambda: len(self.acknowledged) >= before + count, within_s, f"{count} more writes acknowledged")
        return self.acknowledged[before] - (self.acknowledged[before - 1] if before else self.acknowledged[before])

    def longest_pause(self) -> float:
        return max(after - before for before, after in itertools.pairwise(self.acknowledged))

    def silent_s(self) -> float:
        return _now() - self.acknowledged[-1]

    def now(self) -> float:
        return _now()

    def first_after(self, moment: float) -> float:
        """When the first write since was acknowledged."""
        return next(each for each in self.acknowledged if each >= moment)

    def verdict(self) -> Verdict:
        """Everything acknowledged is there once; nothing that was surely refused is."""
        leader = operator(self.trio.leader().link, self.trio.admin)
        tokens = leader.Get(operator_pb2.GetRequest(kind="tokens"), timeout=20.0).tokens
        found = sorted(token.name for token in tokens if token.name.startswith(self.prefix))
        twice = {name for name in found if found.count(name) > 1}
        assert not twice, f"written twice: {twice}"
        refused = {done.asked: done.detail for done in self.history.done if done.outcome is Outcome.REFUSED}
        there = {asked: told for asked, told in refused.items() if asked in found}
        assert not there, f"refused, and there all the same: {there}"
        return judge([self.history], lambda asked: asked if asked in found else None)

    def _run(self) -> None:
        stubs = {each.link: operator(each.link, self.trio.admin) for each in self.trio.members}
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
                self.history.end(call, Outcome.REFUSED if sure else Outcome.UNKNOWN, told, _now())
                addresses.append(addresses.pop(0))
                self._stopping.wait(0.02)
                continue
            self.history.end(call, Outcome.OK, name, _now())
            self.acknowledged.append(_now())


def _now() -> float:
    return time.monotonic()  # noqa: TID251 - the tests' own clock
