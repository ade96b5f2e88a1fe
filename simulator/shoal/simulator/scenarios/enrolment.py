"""One node enrols while one process is killed at one step: a token is created, redeemed for a certificate, and the node
says hello.

The joining node retries with what it has. The operator creates another token if the first one was used up. The
authority here only numbers what it issues: signatures and requests are tested with the real one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

from shoal.coordinator import codec
from shoal.coordinator.controllers.fleet.records import NODES
from shoal.coordinator.controllers.identity.certificates import IdentityRecord, key_of
from shoal.coordinator.controllers.identity.enrolment import TOKENS, CreatedToken, Enrolment, Redemption, Token
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.ports import IssuedCertificate, Transaction
from shoal.simulator.parts.cluster import SimIdSource
from shoal.simulator.parts.operators import OPERATOR_URI
from shoal.simulator.parts.storage import CommitMoment, SimStore
from shoal.simulator.scenarios.region_run import RegionRun as Run
from shoal.simulator.scenarios.single_fault import FaultCell, SingleFaultScenario
from shoal.simulator.world.world import SimProcess
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall

T = TypeVar("T")

STEPS: Final = ("created", "redeemed", "greeted")
FAULTS: Final = ("coordinator", "coordinator-power", "joiner", "gateway-power")
JOINER: Final = "edge-0"
JOIN_TIMEOUT_S: Final = 90.0
"""Virtual seconds; enough for the coordinator to be down twice."""
RETRY_S: Final = 1.0


class SimCertificateIssuer:
    """ports.CertificateIssuer. The region's CA: every certificate has its own serial."""

    ca_pem = b"simulated"
    fingerprint = "0" * 64
    fingerprints = (fingerprint,)

    def __init__(self, ids: SimIdSource) -> None:
        self._ids = ids

    def check(self, csr_pem: bytes, name: str) -> None:
        return None

    def issue(
        self, csr_pem: bytes, role: Role, name: str, *, hosts: tuple[str, ...], lifetime_s: Seconds, wall: Wall
    ) -> IssuedCertificate:
        serial = self._ids.name("serial")
        return IssuedCertificate(serial.encode(), serial, Wall(wall + lifetime_s), self.fingerprint)


class EnrolmentScenario(SingleFaultScenario):
    """A region of gateways and nodes, one of which has not enrolled yet."""

    def __init__(self, run: Run, cell: FaultCell, fault_delay_s: float) -> None:
        super().__init__(run, cell, fault_delay_s)
        self.joiner = self.cluster.network.machines[JOINER]
        self.joiner.has_power = False
        self._enrolment: Enrolment | None = None
        self._joining: asyncio.Task[None] | None = None
        self._certificate = b""
        self.cluster.on_coordinator_start = self._serve

    async def _serve(self, process: SimProcess, region: RegionalCoordinator) -> None:
        self._enrolment = Enrolment(region.context, SimCertificateIssuer(SimIdSource(self.world, process)))

    async def begin(self) -> None:
        return None

    def documents(self, model: str, replicas: int) -> str:
        raise NotImplementedError

    async def act(self) -> None:
        deadline = self.world.now() + JOIN_TIMEOUT_S
        while not self._certificate:
            self._joining = asyncio.ensure_future(self._join())
            await asyncio.wait((self._joining,), timeout=max(0.0, deadline - self.world.now()))
            if self.world.now() >= deadline:
                self.world.fail(f"not joined within {JOIN_TIMEOUT_S:.0f} s")
                await asyncio.get_running_loop().create_future()
        self.cluster.restore_power(self.joiner)
        await self.wait_until(self._is_known, JOIN_TIMEOUT_S, "the node to be known")
        await asyncio.sleep(1.0)  # a fault after the last step's effect

    def _is_known(self) -> bool:
        region = self.cluster.region
        return region is not None and not self.cluster.convergence.missing_at(region, self.joiner)

    async def _join(self) -> None:
        """Create and redeem tokens until there is a certificate, or the joining process is killed."""
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
            await asyncio.sleep(RETRY_S)

    async def _call(self, what: str, act: Callable[[Enrolment], Awaitable[T]]) -> tuple[T | None, str]:
        """(the result, None unless the call returned; the outcome)."""
        found: list[T] = []

        async def there(region: RegionalCoordinator) -> None:
            assert self._enrolment is not None
            found.append(await act(self._enrolment))

        outcome = await self.cluster.operators.try_once(what, there)
        return (found[0] if outcome == "ok" else None), outcome

    def inject_fault(self) -> None:
        who, _, part = self.cell.fault.partition("-")
        match who:
            case "coordinator":
                self.cluster.kill_coordinator(power=part == "power")
            case "gateway":
                self.break_part(self.cluster.network.machines["gateway"], part, 6.0)
            case _:
                if self._joining is not None and not self._joining.done():
                    self._joining.cancel()
                else:
                    self.break_part(self.joiner, "supervisor", 0.0)

    def steps_in(self, moment: CommitMoment, transaction: Transaction) -> tuple[str, ...]:
        found = []
        tokens = [codec.load(Token, value) for key, value in transaction.puts.items() if key.startswith(TOKENS)]
        if any(token.used_at is None for token in tokens):
            found.append("created")
        if any(token.used_at is not None for token in tokens):
            found.append("redeemed")
        if NODES + JOINER in transaction.puts:
            found.append("greeted")
        return tuple(found)

    async def converge(self) -> None:
        await super().converge()
        store = self.cluster.store
        assert store is not None
        self.world.record("enrolled", holds=self._certificate.decode(), **_stored_facts(store))


async def _create(enrolment: Enrolment) -> CreatedToken:
    return await enrolment.create(Role.AGENT, JOINER, 3600.0, OPERATOR_URI)


async def _redeem(enrolment: Enrolment, token: str) -> Redemption:
    return await enrolment.redeem(token, b"request", JOINER, peer="192.0.2.7")


def _stored_facts(store: SimStore) -> dict[str, object]:
    contents = store.contents()
    tokens = (codec.load(Token, value) for key, value in sorted(contents.items()) if key.startswith(TOKENS))
    known = contents.get(key_of(Role.AGENT, JOINER))
    assert known is not None
    return {
        "used": tuple(token.id for token in tokens if token.used_at is not None),
        "certificates": tuple(each.serial for each in codec.load(IdentityRecord, known).held),
    }
