"""Faults for regions that negotiate: any message lost, duplicated or late, any process killed at any step.

As in `region_faults`, each seed enables only some kinds.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shoal.simulator.parts.federation import SimFederation
from shoal.simulator.world.disk import FLUSH_S
from shoal.simulator.world.rng import Rng
from shoal.types.units import Seconds

Inject = Callable[[SimFederation, Rng], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class FederationFault:
    """One kind of fault."""

    name: str
    # Mean seconds between two faults of this kind.
    every_s: float
    inject: Inject


async def _degrade_paths(federation: SimFederation, rng: Rng) -> None:
    loss, late, duplicate = rng.uniform(0.0, 0.4), rng.uniform(0.0, 0.4), rng.uniform(0.0, 0.8)
    delay_s = rng.choice([0.005, 0.05, 0.5])
    federation.world.record("fault.weather", loss=loss, late=late, duplicate=duplicate, delay=delay_s)
    for path in federation.paths():
        path.loss, path.late, path.duplicate, path.delay_s = loss, late, duplicate, delay_s
    await asyncio.sleep(rng.uniform(1.0, 8.0))
    federation.reset_paths()


async def _kill_region(federation: SimFederation, rng: Rng) -> None:
    """Kill the coordinator at a step of its ports: before it writes, after, or after the effect."""
    site = rng.choice(list(federation.sites.values()))
    site.kill(steps=rng.randint(1, 80))


async def _reboot_region(federation: SimFederation, rng: Rng) -> None:
    site = rng.choice(list(federation.sites.values()))
    site.kill(reboots=True, steps=rng.randint(1, 80) if rng.happens(0.5) else 0)


async def _stop_region(federation: SimFederation, rng: Rng) -> None:
    rng.choice(list(federation.sites.values())).pause(rng.choice([0.5, 0.5, 3.0, 3.0, 12.0, 40.0]))


async def _kill_federation(federation: SimFederation, rng: Rng) -> None:
    rng.choice(list(federation.replicas.values())).kill(steps=rng.randint(0, 30))


async def _partition(federation: SimFederation, rng: Rng) -> None:
    """Cut two processes off from each other, in one direction or both; often two that share an agreement."""
    pairs = federation.delegating_pairs()
    anybody = [party.name for party in federation.parties()]
    one, other = rng.choice(pairs) if pairs and rng.happens(0.6) else rng.sample(anybody, 2)
    directions = rng.choice([(True, True), (True, True), (True, False), (False, True)])
    federation.world.record("fault.cut", one=one, other=other, directions=directions)
    paths = (federation.network.path(one, other), federation.network.path(other, one))
    for path, wanted in zip(paths, directions, strict=True):
        path.cut = path.cut or wanted
    await asyncio.sleep(rng.choice([0.5, 3.0, 10.0, 60.0]) * rng.uniform(0.5, 1.2))
    for path in paths:
        path.cut = False


async def _slow_disk(federation: SimFederation, rng: Rng) -> None:
    site = rng.choice(list(federation.sites.values()))
    flush_s = rng.choice([0.02, 0.1, 0.4])
    federation.world.record("fault.slow-disk", disk=site.name, flush=flush_s)
    site.disk.flush_s = flush_s
    await asyncio.sleep(rng.uniform(1.0, 8.0))
    site.disk.flush_s = FLUSH_S


async def _full_disk(federation: SimFederation, rng: Rng) -> None:
    site = rng.choice(list(federation.sites.values()))
    federation.world.record("fault.full-disk", disk=site.name)
    site.disk.full = True
    await asyncio.sleep(rng.uniform(0.2, 6.0))
    site.disk.full = False


async def _lose_commit_answers(federation: SimFederation, rng: Rng) -> None:
    """Some commits take effect, but their answer is lost."""
    site = rng.choice(list(federation.sites.values()))
    site.set_unanswered_share(rng.uniform(0.1, 0.9))
    await asyncio.sleep(rng.uniform(0.2, 4.0))
    site.set_unanswered_share(0.0)


async def _withdraw(federation: SimFederation, rng: Rng) -> None:
    """A delegate gives notice."""
    sites = [site for site in federation.sites.values() if site.is_up and site.guests]
    if sites:
        site = rng.choice(sites)
        federation.world.record("fault.withdrawn", region=site.name)
        site.withdraw(rng.choice(site.guests), Seconds(rng.choice([0.0, 2.0, 20.0])))


async def _withdraw_intents(federation: SimFederation, rng: Rng) -> None:
    """Delete what a region wants, and want it again later."""
    sites = [site for site in federation.sites.values() if site.applied_intents]
    if not sites:
        return
    site = rng.choice(sites)
    wanted = site.applied_intents
    federation.world.record("fault.taken-back", region=site.name)
    site.set_intents(())
    await asyncio.sleep(rng.uniform(0.1, 4.0))
    site.set_intents(wanted)


FEDERATION_FAULTS = (
    FederationFault("weather", 3.0, _degrade_paths),
    FederationFault("region-kill", 2.0, _kill_region),
    FederationFault("region-reboot", 4.0, _reboot_region),
    FederationFault("region-stop", 4.0, _stop_region),
    FederationFault("federation-kill", 3.0, _kill_federation),
    FederationFault("partition", 3.0, _partition),
    FederationFault("slow-disk", 4.0, _slow_disk),
    FederationFault("full-disk", 4.0, _full_disk),
    FederationFault("store-doubt", 3.0, _lose_commit_answers),
    FederationFault("withdrawal", 6.0, _withdraw),
    FederationFault("change-of-mind", 6.0, _withdraw_intents),
)


class FederationFaultSchedule:
    """The faults of one run."""

    def __init__(self, federation: SimFederation) -> None:
        self._federation = federation
        rng = federation.world.rng.stream("trouble")
        self._streams = {kind.name: rng.stream(kind.name) for kind in FEDERATION_FAULTS}
        drawn = [kind for kind in FEDERATION_FAULTS if self._streams[kind.name].happens(0.4)]
        self._kinds = drawn or [rng.choice(FEDERATION_FAULTS)]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind.name for kind in self._kinds)

    async def run(self, seconds: float) -> None:
        """Strike for `seconds`; return when every lasting fault is over."""
        until = self._federation.world.now() + seconds
        async with asyncio.TaskGroup() as group:
            for kind in self._kinds:
                group.create_task(self._inject_repeatedly(kind, until))

    def clear(self) -> None:
        """End every lasting fault."""
        federation = self._federation
        federation.reset_paths()
        for path in federation.paths():
            path.cut = False
        for site in federation.sites.values():
            site.disk.flush_s = FLUSH_S
            site.disk.full = False
            site.set_unanswered_share(0.0)
        for party in federation.parties():
            if party.process is not None:
                party.process.steps_to_live = 0
                party.resume(party.process)

    async def _inject_repeatedly(self, kind: FederationFault, until: float) -> None:
        rng = self._streams[kind.name]
        first = rng.uniform(0.0, 1.0)  # most of a negotiation is over within a second
        while self._federation.world.now() + first < until:
            await asyncio.sleep(first)
            await kind.inject(self._federation, rng)
            first = rng.exponential(kind.every_s)
