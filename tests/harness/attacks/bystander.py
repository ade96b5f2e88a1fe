"""A client that keeps working beside an attack, and the cost of the attack to it, to us and to the attacker (I11).

Figures are ratios within one run. All of them are recorded; tests assert only generous margins, because the test
machine has other work.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.crypto.pki import CertificateFiles

BASELINE_CALLS = 100
"""Calls before the attack."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One process of an attack, run from the command line of `module`."""

    # Name of the attack, as `module` knows it.
    kind: str
    # host:port of the attacked server.
    address: str
    # How many times it attacks.
    count: int
    # Client certificate that it presents; None: it has none.
    files: CertificateFiles | None = None
    # Python module that is the attacker.
    module: str = "harness.attacks.attacker"

    def command(self) -> list[str]:
        files = (
            [str(path) for path in (self.files.certificate, self.files.key, self.files.authority)] if self.files else []
        )
        return ["-m", self.module, self.kind, self.address, str(self.count), *files]


@dataclass(frozen=True, slots=True)
class AttackCost:
    """What the attacks cost the bystander, the attacked processes and the attackers."""

    # The bystander's calls during the attacks.
    calls: int
    # One text per failed call of the bystander.
    errors: list[str]
    # Median of the bystander's calls during the attacks.
    p50_ms: float
    # 99th percentile of the bystander's calls during the attacks.
    p99_ms: float
    # Median during the attacks over the median before them.
    slower_p50: float
    # 99th percentile during the attacks over that before them.
    slower_p99: float
    # CPU seconds of the attacked processes, without what the bystander's calls cost.
    ours_s: float
    # CPU seconds of the attackers.
    theirs_s: float
    # Peak growth of the attacked processes' resident memory.
    growth_bytes: int
    # What each attacker reported about itself.
    attackers: list[dict[str, Any]]

    def figures(self) -> dict[str, Any]:
        """The figures as the report shows them."""
        return {
            "victim_calls": self.calls,
            "victim_failed": len(self.errors),
            "p50_ms": round(self.p50_ms, 2),
            "p99_ms": round(self.p99_ms, 2),
            "slower_p50": round(self.slower_p50, 2),
            "slower_p99": round(self.slower_p99, 2),
            "cpu_ours_per_theirs": round(self.ours_s / max(self.theirs_s, 0.01), 2),
            "grown_mib": self.growth_bytes // 2**20,
        }


async def run_beside(
    ask: Callable[[], Awaitable[object]], pids: Sequence[int], attacks: Sequence[Attack], *, for_s: float
) -> AttackCost:
    """Call repeatedly during the attacks, until all of them are done or `for_s` seconds are over."""
    loop = asyncio.get_running_loop()
    ours = [psutil.Process(pid) for pid in pids]

    async def once() -> float:
        start = loop.time()
        await ask()
        return loop.time() - start

    before = _cpu(ours)
    calm = sorted([await once() for _ in range(BASELINE_CALLS)])
    cpu, memory = _cpu(ours), _memory(ours)
    for_a_call = (cpu - before) / BASELINE_CALLS
    most = memory
    errors: list[str] = []
    taken: list[float] = []
    attackers = [await _start(attack) for attack in attacks]
    ended = asyncio.gather(*(attacker.stdout.readline() for attacker in attackers if attacker.stdout))
    try:
        end = loop.time() + for_s
        while not ended.done() and loop.time() < end:
            try:
                taken.append(await once())
            except Exception as error:
                errors.append(repr(error))
            most = max(most, _memory(ours))
    finally:
        for attacker in attackers:
            assert attacker.stdin is not None
            attacker.stdin.close()
        async with asyncio.timeout(20):
            said = [json.loads(line) for line in await ended]
        for attacker in attackers:
            await attacker.wait()
    hurt = sorted(taken) or [for_s]
    return AttackCost(
        calls=len(taken) + len(errors),
        errors=errors,
        p50_ms=_at(hurt, 0.5) * 1e3,
        p99_ms=_at(hurt, 0.99) * 1e3,
        slower_p50=_at(hurt, 0.5) / _at(calm, 0.5),
        slower_p99=_at(hurt, 0.99) / _at(calm, 0.99),
        ours_s=max(0.0, _cpu(ours) - cpu - for_a_call * len(taken)),
        theirs_s=sum(each["cpu_s"] for each in said),
        growth_bytes=most - memory,
        attackers=said,
    )


async def _start(attack: Attack) -> asyncio.subprocess.Process:
    """Returns when the attack has begun."""
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        *attack.command(),
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    assert started.stdout is not None
    assert json.loads(await started.stdout.readline())["event"] == "attacking"
    return started


def _at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def _cpu(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _memory(processes: Sequence[psutil.Process]) -> int:
    return sum(process.memory_info().rss for process in processes)
