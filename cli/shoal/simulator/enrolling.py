"""One node that joins: a token is made, redeemed for a certificate, and the node says hello; one process is killed at
one of these steps. Who joins tries again with what it has; who made the token makes another where it was used up.

Signatures and requests are checked where they are real: the authority here only numbers what it issues.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

from cryptography.x509 import Certificate

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.enrolment import TOKENS, CreatedToken, Enrolment, Redeemed, Token
from shoal.coordinator.controllers.fleet import NODES
from shoal.coordinator.controllers.identities import IdentityRecord, key_of
from shoal.coordinator.controllers.region import NoMeter, Region
from shoal.coordinator.ports import Issued, Transaction
from shoal.simulator.cluster import Ids
from shoal.simulator.operators import WHO
from shoal.simulator.scenario import Stage as Run
from shoal.simulator.storage import Moment, Store
from shoal.simulator.story import Cell, Story
from shoal.simulator.world import Process
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall

T = TypeVar("T")

STEPS: Final = ("created", "redeemed", "greeted")
VICTIMS: Final = ("coordinator", "coordinator-power", "joiner", "gateway-power")
JOINER: Final = "edge-0"
JOINS_S: Final = 90.0
"""Virtual seconds, in which the coordinator may be away twice."""
AGAIN_S: Final = 1.0


class Authority:
    """The region's CA: every certificate has a number of its own."""

    ca_pem = b"simulated"
    fingerprint = "0" * 64
    fingerprints = (fingerprint,)

    def __init__(self, ids: Ids) -> None:
        self._ids = ids

    def recognise(self, certificate: Certificate, *, retired: bool = False) -> str:
        return self.fingerprint

    def check(self, csr_pem: bytes, name: str) -> None:
        return None

    def issue(
        self, csr_pem: bytes, role: Role, name: str, *, hosts: tuple[str, ...], lifetime_s: Seconds, wall: Wall
    ) -> Issued:
        serial = self._ids.name("serial")
        return Issued(serial.encode(), serial, Wall(wall + lifetime_s), self.fingerprint)


class Enrolling(Story):
    """A region of gateways and nodes, one of which is not one of it yet."""

    def __init__(self, run: Run, cell: Cell, late_s: float) -> None:
        super().__init__(run, cell, late_s)
        self.joiner = self.cluster.network.machines[JOINER]
        self.joiner.powered = False
        self._enrolment: Enrolment | None = None
        self._joining: asyncio.Task[None] | None = None
        self._certificate = b""
        self.cluster.joins = self._serve

    async def _serve(self, process: Process, region: Region) -> None:
        store = self.cluster.store
        assert store is not None
        ids = Ids(self.world, process)
        self._enrolment = Enrolment(
            region.config.name, store, Authority(ids), region.events, self.cluster.clock, ids, NoMeter()
        )

    async def begin(self) -> None:
        return None

    def documents(self, model: str, replicas: int) -> str:
        raise NotImplementedError

    async def act(self) -> None:
        deadline = self.world.now() + JOINS_S
        while not self._certificate:
            self._joining = asyncio.ensure_future(self._join())
            await asyncio.wait((self._joining,), timeout=max(0.0, deadline - self.world.now()))
            if self.world.now() >= deadline:
                self.world.fail(f"not joined within {JOINS_S:.0f} s")
                await asyncio.get_running_loop().create_future()
        self.cluster.restore_power(self.joiner)
        await self.until(self._is_known, JOINS_S, "the node to be known")
        await asyncio.sleep(1.0)  # a blow after the last step's effect

    def _is_known(self) -> bool:
        region = self.cluster.region
        return region is not None and not self.cluster.missing_at(region, self.joiner)

    async def _join(self) -> None:
        """Somebody makes a token, somebody redeems it: until there is a certificate, or the joiner is killed."""
        token = ""
        while not self._certificate:
            if not token:
                created, _ = await self._call("create", _create)
                token = created.text if created is not None else ""
            else:
                redeemed, outcome = await self._call("redeem", partial(_redeem, token=token))
                if redeemed is not None:
                    self._certificate = redeemed.certificate_pem
                elif "TOKEN_USED" in outcome:
                    token = ""
            await asyncio.sleep(AGAIN_S)

    async def _call(self, what: str, act: Callable[[Enrolment], Awaitable[T]]) -> tuple[T | None, str]:
        """What it came to, where it was heard."""
        found: list[T] = []

        async def there(region: Region) -> None:
            assert self._enrolment is not None
            found.append(await act(self._enrolment))

        outcome = await self.cluster.operators.offer(what, there)
        return (found[0] if outcome == "ok" else None), outcome

    def strike(self) -> None:
        who, _, part = self.cell.victim.partition("-")
        match who:
            case "coordinator":
                self.cluster.kill_coordinator(power=part == "power")
            case "gateway":
                self.hit(self.cluster.network.machines["gateway"], part, 6.0)
            case _:
                if self._joining is not None and not self._joining.done():
                    self._joining.cancel()
                else:
                    self.hit(self.joiner, "supervisor", 0.0)

    def steps(self, moment: Moment, transaction: Transaction) -> tuple[str, ...]:
        found = []
        tokens = [records.load(Token, value) for key, value in transaction.puts.items() if key.startswith(TOKENS)]
        if any(token.used_at is None for token in tokens):
            found.append("created")
        if any(token.used_at is not None for token in tokens):
            found.append("redeemed")
        if NODES + JOINER in transaction.puts:
            found.append("greeted")
        return tuple(found)

    async def settle(self) -> None:
        await super().settle()
        store = self.cluster.store
        assert store is not None
        self.world.record("enrolled", holds=self._certificate.decode(), **_kept(store))


async def _create(enrolment: Enrolment) -> CreatedToken:
    return await enrolment.create(Role.AGENT, JOINER, 3600.0, WHO)


async def _redeem(enrolment: Enrolment, token: str) -> Redeemed:
    return await enrolment.redeem(token, b"request", JOINER, peer="192.0.2.7")


def _kept(store: Store) -> dict[str, object]:
    contents = store.contents()
    tokens = (records.load(Token, value) for key, value in sorted(contents.items()) if key.startswith(TOKENS))
    known = contents.get(key_of(Role.AGENT, JOINER))
    assert known is not None
    return {
        "used": tuple(token.id for token in tokens if token.used_at is not None),
        "certificates": tuple(each.serial for each in records.load(IdentityRecord, known).held),
    }
