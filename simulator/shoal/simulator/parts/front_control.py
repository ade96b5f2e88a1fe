"""How a supervisor controls its machine's front, and how that compares a new replica with another one."""

import asyncio
from collections.abc import AsyncIterator

from shoal.agent.core.wakes import UnloadedReplica
from shoal.agent.ports import (
    FrontStats,
    LocalWorker,
    ReferenceRecording,
    StatefulReplica,
    VerificationSource,
)
from shoal.host.event_wait import wait_or_timeout
from shoal.simulator.parts.front import FrontServing, SimFront
from shoal.simulator.parts.machine import SimMachine
from shoal.simulator.parts.workers import answer_signature
from shoal.simulator.world.world import SimProcess
from shoal.types.address import HostPort
from shoal.types.assignment import Credential, Forwarding, PeerTrust
from shoal.types.codes import Code, refuse
from shoal.types.migration import Against, Drift, InputsFrom, Metric, Verdict, Verification, Verifier
from shoal.types.route import Route
from shoal.types.tenant import TenantLimit
from shoal.types.units import Seconds


class SimFrontControl:
    """Implements the Front port: how the supervisor controls the machine's front."""

    def __init__(self, process: SimProcess, machine: SimMachine) -> None:
        self._process = process
        self._machine = machine
        self.is_adopted = machine.front.alive
        self.waits_for_routes = True

    async def configure(
        self,
        routes: tuple[Route, ...],
        credentials: tuple[Credential, ...],
        workers: tuple[LocalWorker, ...] = (),
        revoked: tuple[str, ...] = (),
        peers: tuple[PeerTrust, ...] = (),
        verification_sources: tuple[VerificationSource, ...] = (),
        stateful_replicas: tuple[StatefulReplica, ...] = (),
        forwarding: Forwarding | None = None,
        tenants: tuple[TenantLimit, ...] = (),
        unloaded: tuple[UnloadedReplica, ...] = (),
        routes_on_demand: bool = False,
    ) -> None:
        self._process.gate("configure front")
        await asyncio.sleep(0.001)
        self._process.check()
        machine = self._machine
        if not machine.front.process.alive:
            machine.front = SimFront(machine)
        machine.front.configure(
            FrontServing(
                *(routes, workers, peers, verification_sources),
                unloaded=unloaded,
                routes_on_demand=routes_on_demand,
            )
        )
        self._process.gate("configured front")

    async def verify(self, worker: LocalWorker, asked: Verification, pack: str) -> Verdict:
        """Compare as many answers with the source's front as there are samples; each exchange may be lost."""
        machine = self._machine
        target = machine.workers.get(worker.assignment)
        expected = ""
        for _ in range(asked.samples):
            self._process.check()
            if target is None or not target.alive or not machine.front.alive:
                raise refuse(Code.REPLICA_UNREACHABLE, "the new replica is gone", "its answer", "it is loaded again")
            await asyncio.sleep(machine.models[target.assignment.model].serve_s)
            if asked.against is Against.SOURCE:
                source = self._answer_from_region if asked.agreement else self._answer_from_source
                expected = await source(asked)
        self._process.gate("verified")
        passed = target is not None and expected in ("", answer_signature(machine, target))
        machine.world.record(
            "verified", node=machine.name, assignment=worker.assignment, migration=asked.migration, passed=passed
        )
        code, reason = (None, "") if passed else (Code.VERIFY_FAILED, "y: max_rel 1, at most 0.001")
        drift = Drift("y", Metric.MAX_REL, 1e-3, 0.0 if passed else 1.0, passed)
        used = InputsFrom.GENERATED
        return Verdict(asked.migration, passed, code, reason, asked.against, used, asked.samples, (drift,))

    async def record(self, worker: LocalWorker, asked: Verification, pack: str) -> ReferenceRecording:
        raise NotImplementedError("no scenario verifies against a reference")

    async def _answer_from_region(self, asked: Verification) -> str:
        """The other region's answer to one input, through a gateway. Raises ShoalError."""
        peer, back = await self._reach_source(asked)
        leads = (each for route in peer.front.routes.values() for each in route.endpoints)
        out = next((each for each in leads if each.agreement == asked.agreement), None)
        if not peer.front.alive or out is None:
            raise refuse(Code.MODEL_NOT_READY, f"{peer.name} leads to no {asked.agreement}", "a way there", "retry")
        began = peer.world.now()
        code = await peer.network.other_regions.infer(peer, out)
        outcome = Seconds(peer.world.now() - began) if code is None else code
        peer.front.traffic.add(out.agreement, out.region, outcome)
        await asyncio.sleep(back)
        if code is not None:
            raise refuse(code, f"{out.region} does not answer", "an answer", "retry")
        return peer.network.other_regions.answer_signature(out.region)

    async def _reach_source(self, asked: Verification) -> tuple[SimMachine, float]:
        """(the machine that answers for the source, once the request has arrived; seconds for the way back). Raises
        ShoalError(REPLICA_UNREACHABLE)."""
        machine = self._machine
        place = HostPort.parse(asked.source_address).host
        peer = machine.network.machines.get(place)
        there = machine.network.transit(machine.name, place)
        back = machine.network.transit(place, machine.name)
        if peer is None or there is None or back is None:
            await asyncio.sleep(0.5)
            raise refuse(Code.REPLICA_UNREACHABLE, f"{place} does not answer", "an answer", "retry")
        await asyncio.sleep(there)
        return peer, back

    async def _answer_from_source(self, asked: Verification) -> str:
        """The source's answer to one input. Raises ShoalError."""
        machine = self._machine
        peer, back = await self._reach_source(asked)
        serving = peer.front.serving or FrontServing()
        witness = next((each for each in serving.verification_sources if each.assignment == asked.source), None)
        source = peer.workers.get(asked.source)
        if not peer.front.alive or source is None or source.ready is None:
            raise refuse(Code.MODEL_NOT_READY, f"{asked.source} has no worker there", "a ready replica", "retry")
        named = Verifier(asked.migration, machine.identity)
        if witness is None or named not in witness.verifiers:
            raise refuse(Code.ROLE_DENIED, f"{machine.identity}, which no move names", "a verifier", "retry")
        await asyncio.sleep(peer.models[source.assignment.model].serve_s + back)
        if not source.alive:
            raise refuse(Code.WORKER_CRASHED, f"{asked.source} ended", "an answer", "retry")
        return answer_signature(peer, source)

    async def lease(self, seconds: Seconds, claim: str) -> None:
        self._process.gate("lease front")
        self._machine.world.record("front.leased", node=self._machine.name, seconds=seconds)

    async def stats(self) -> FrontStats:
        self._process.gate("front stats")
        machine = self._machine
        front = machine.front
        return FrontStats(
            *(front.alive, (), front.router.outstanding(), front.traffic.agreement_counts()),
            unloaded=tuple(sorted(front.router.unloaded_names)),
            asked=front.route_questions() if front.alive else (),
        )

    async def wakes(self) -> AsyncIterator[str]:
        while True:
            yield await self._machine.wakes.get()

    async def next_ask(self, within_s: Seconds) -> None:
        front = self._machine.front
        await wait_or_timeout(front.asking, within_s, self._machine.clock)
        front.asking.clear()

    async def close(self, *, keep: bool) -> None:
        self._process.gate("close front")
        if not keep:
            self._machine.front.stop()
            self._machine.front = SimFront(self._machine)
