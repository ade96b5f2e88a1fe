"""What strikes regions that trade while they do: every message lost, doubled or late, every party killed at any step.

Like the storm of one region (`faults`), each seed turns on only some kinds.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shoal.simulator.chance import Chance
from shoal.simulator.disk import FLUSH_S
from shoal.simulator.regions import Federated
from shoal.types.units import Seconds

Strike = Callable[[Federated, Chance], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """every_s: mean seconds between strikes."""

    name: str
    every_s: float
    strike: Strike


async def _weather(federated: Federated, chance: Chance) -> None:
    loss, late, duplicate = chance.between(0.0, 0.4), chance.between(0.0, 0.4), chance.between(0.0, 0.8)
    delay_s = chance.pick([0.005, 0.05, 0.5])
    federated.world.record("fault.weather", loss=loss, late=late, duplicate=duplicate, delay=delay_s)
    for path in federated.paths():
        path.loss, path.late, path.duplicate, path.delay_s = loss, late, duplicate, delay_s
    await asyncio.sleep(chance.between(1.0, 8.0))
    federated.clear_weather()


async def _kill_region(federated: Federated, chance: Chance) -> None:
    """At a step of its ports: before what it writes, after, or after what it did."""
    site = chance.pick(list(federated.sites.values()))
    site.kill(steps=chance.whole(1, 80))


async def _reboot_region(federated: Federated, chance: Chance) -> None:
    site = chance.pick(list(federated.sites.values()))
    site.kill(reboots=True, steps=chance.whole(1, 80) if chance.happens(0.5) else 0)


async def _stop_region(federated: Federated, chance: Chance) -> None:
    chance.pick(list(federated.sites.values())).stop(chance.pick([0.5, 0.5, 3.0, 3.0, 12.0, 40.0]))


async def _kill_federation(federated: Federated, chance: Chance) -> None:
    chance.pick(list(federated.replicas.values())).kill(steps=chance.whole(0, 30))


async def _partition(federated: Federated, chance: Chance) -> None:
    """Between two parties, in one direction or both; often two that have an agreement."""
    pairs = federated.pairs()
    anybody = [party.name for party in federated.parties()]
    one, other = chance.pick(pairs) if pairs and chance.happens(0.6) else chance.some(anybody, 2)
    directions = chance.pick([(True, True), (True, True), (True, False), (False, True)])
    federated.world.record("fault.cut", one=one, other=other, directions=directions)
    paths = (federated.between.path(one, other), federated.between.path(other, one))
    for path, wanted in zip(paths, directions, strict=True):
        path.cut = path.cut or wanted
    await asyncio.sleep(chance.pick([0.5, 3.0, 10.0, 60.0]) * chance.between(0.5, 1.2))
    for path in paths:
        path.cut = False


async def _slow_disk(federated: Federated, chance: Chance) -> None:
    site = chance.pick(list(federated.sites.values()))
    flush_s = chance.pick([0.02, 0.1, 0.4])
    federated.world.record("fault.slow-disk", disk=site.name, flush=flush_s)
    site.disk.flush_s = flush_s
    await asyncio.sleep(chance.between(1.0, 8.0))
    site.disk.flush_s = FLUSH_S


async def _full_disk(federated: Federated, chance: Chance) -> None:
    site = chance.pick(list(federated.sites.values()))
    federated.world.record("fault.full-disk", disk=site.name)
    site.disk.full = True
    await asyncio.sleep(chance.between(0.2, 6.0))
    site.disk.full = False


async def _doubt(federated: Federated, chance: Chance) -> None:
    """Commits that are done, and not answered."""
    site = chance.pick(list(federated.sites.values()))
    site.doubts(chance.between(0.1, 0.9))
    await asyncio.sleep(chance.between(0.2, 4.0))
    site.doubts(0.0)


async def _withdraw(federated: Federated, chance: Chance) -> None:
    """A delegate gives notice."""
    sites = [site for site in federated.sites.values() if site.is_up and site.guests]
    if sites:
        site = chance.pick(sites)
        federated.world.record("fault.withdrawn", region=site.name)
        site.withdraw(chance.pick(site.guests), Seconds(chance.pick([0.0, 2.0, 20.0])))


async def _change_mind(federated: Federated, chance: Chance) -> None:
    """What is wanted is taken back, and wanted again."""
    sites = [site for site in federated.sites.values() if site.wanted]
    if not sites:
        return
    site = chance.pick(sites)
    wanted = site.wanted
    federated.world.record("fault.taken-back", region=site.name)
    site.want(())
    await asyncio.sleep(chance.between(0.1, 4.0))
    site.want(wanted)


KINDS = (
    Kind("weather", 3.0, _weather),
    Kind("region-kill", 2.0, _kill_region),
    Kind("region-reboot", 4.0, _reboot_region),
    Kind("region-stop", 4.0, _stop_region),
    Kind("federation-kill", 3.0, _kill_federation),
    Kind("partition", 3.0, _partition),
    Kind("slow-disk", 4.0, _slow_disk),
    Kind("full-disk", 4.0, _full_disk),
    Kind("store-doubt", 3.0, _doubt),
    Kind("withdrawal", 6.0, _withdraw),
    Kind("change-of-mind", 6.0, _change_mind),
)


class Trouble:
    """The faults of one run."""

    def __init__(self, federated: Federated) -> None:
        self._federated = federated
        chance = federated.world.chance.stream("trouble")
        self._streams = {kind.name: chance.stream(kind.name) for kind in KINDS}
        drawn = [kind for kind in KINDS if self._streams[kind.name].happens(0.4)]
        self._kinds = drawn or [chance.pick(KINDS)]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind.name for kind in self._kinds)

    async def strike(self, seconds: float) -> None:
        """For so long; returns when every fault that lasts is over."""
        until = self._federated.world.now() + seconds
        async with asyncio.TaskGroup() as group:
            for kind in self._kinds:
                group.create_task(self._keep_striking(kind, until))

    def calm(self) -> None:
        """Ends every fault that lasts."""
        federated = self._federated
        federated.clear_weather()
        for path in federated.paths():
            path.cut = False
        for site in federated.sites.values():
            site.disk.flush_s = FLUSH_S
            site.disk.full = False
            site.doubts(0.0)
        for party in federated.parties():
            if party.process is not None:
                party.process.fuse = 0
                party.go_on(party.process)

    async def _keep_striking(self, kind: Kind, until: float) -> None:
        chance = self._streams[kind.name]
        first = chance.between(0.0, 1.0)  # most of a negotiation is over within a second
        while self._federated.world.now() + first < until:
            await asyncio.sleep(first)
            await kind.strike(self._federated, chance)
            first = chance.delay(kind.every_s)
