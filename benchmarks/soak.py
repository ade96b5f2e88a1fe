"""A region under a mixed load while its processes are killed, for minutes or hours: `shoal bench soak`.

A local region of real processes: a coordinator, a gateway, two agents. It serves six models: a small one, once and
twice, a classifier, tensors of 1 MB, one with `batching`, one with sessions. Unmodified clients (tritonclient and
shoal.client, over gRPC, streams and REST) ask all of them at the gateway and at both agents' fronts: with deadlines and
without, sessions with state, calls that are cancelled, requests that are wrong, a tenant over its quota. Meanwhile, in
an order that `--seed` gives, workers, an agent's front and the gateway's are killed (SIGKILL), an agent is ended
(SIGTERM) and drained, and models move live. The next fault comes when the region is whole again.

Every answer is compared with ONNX Runtime's in the clients' process: bit for bit, in batches within the default
tolerance. Every request is accounted for: answered, refused with a code that it may be refused with, cancelled, or
lost. A client repeats what broke or what a front said would pass, as the README's does, for 90 s; what still fails then
is lost. Attempts that failed while no fault was on are listed.

The memory that every process holds is sampled each second. Twice, after a quarter of the run and at its end, nobody
asks for a quarter of a minute, so that what is compared is no request's, nor what a front keeps for the next one.
Growth is from the one rest to the other, of processes that lived through both; those that replaced each other are
compared at equal age.

The last line is one JSON object; of a role, growth in MiB is that of the process that grew most. Exit status 1 if an
answer was wrong, a request was lost, the region was not whole again 90 s after a fault, or a process grew by more than
5 % from one rest to the other.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from _machine import machine_line

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from _soak import memory as m
from _soak.outcomes import LaneSummary, Outcome, RequestRecord, explain, longest_gaps, summarise, under_way
from _soak.region import Fault, FaultDeck, SoakRegion, soak_models, soak_region

PAUSE_S: Final = 6.0
"""Seconds from when the region is whole to the next fault."""
REST_S: Final = 15.0
"""Seconds of a rest."""
SETTLE_S: Final = 5.0
"""Seconds of a rest in which what is under way ends. After one without requests a front gives back what it kept."""
WARM: Final = 0.25
"""Of the run, until the first rest."""
FLAT: Final = 0.05
"""Of what a process held at the first rest: by how much it may have grown at the last."""
LATE_S: Final = 1.0
"""Seconds after a fault during which an attempt that began in it may still fail."""
END_S: Final = 150.0
"""Seconds in which the load must have ended: more than its requests are repeated for."""
MIB: Final = 2**20


class Load:
    """The clients' process."""

    def __init__(self, region: SoakRegion, folder: Path, seed: int) -> None:
        self._records = folder / "records"
        spec = folder / "load.json"
        said = {
            "doors": region.doors(),
            "context": asdict(region.up.client),
            "bearer": region.bearer,
            "models": {name: str(path) for name, path in region.models.items()},
            "seed": seed,
            "records": str(self._records),
        }
        spec.write_text(json.dumps(said))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "_soak.load", str(spec)],
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit("the clients did not start")

    def rest(self) -> m.Window:
        """Nobody asks for REST_S. Returns when the region was at rest. Raises SystemExit unless the clients run."""
        self.check()
        self._say("rest")
        time.sleep(SETTLE_S)
        began = time.monotonic()
        time.sleep(REST_S - SETTLE_S)
        ended = time.monotonic()
        self._say("go")
        return began, ended

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Raises SystemExit unless they run."""
        if self._process.poll() is not None:
            raise SystemExit(f"the clients ended with status {self._process.returncode}")

    def end(self) -> None:
        """Raises SystemExit unless they ended by themselves."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise SystemExit(f"the clients did not end within {END_S:g} s") from None
        if status:
            raise SystemExit(f"the clients ended with status {status}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def records(self) -> list[RequestRecord]:
        return [RequestRecord.from_line(line) for line in self._records.read_text().splitlines()]


def inject_faults(deck: FaultDeck, load: Load, done: list[Fault], until: float) -> None:
    """One fault after another, until then. Raises SystemExit where the load ends early."""
    while time.monotonic() + PAUSE_S < until:
        time.sleep(PAUSE_S)
        fault = deck.next()
        load.check()
        done.append(fault)
        print(f"# {len(done)} {fault.kind}: {fault.target}, {fault.until - fault.since:.1f} s", flush=True)


def show_lanes(lanes: dict[str, LaneSummary]) -> None:
    names = (*Outcome,)
    print(f"\n{'lane':34} {' '.join(f'{name:>9}' for name in names)} repeated  p50 ms   p99 ms  most ms")
    for name, lane in lanes.items():
        counts = " ".join(f"{lane.outcomes.get(each, 0):>9}" for each in names)
        times = f"{1e3 * lane.p50_s:>7.1f} {1e3 * lane.p99_s:>8.1f} {1e3 * lane.most_s:>8.0f}"
        print(f"{name:34} {counts} {lane.repeated:>8} {times}")


def show_growth(found: Sequence[m.Growth]) -> None:
    print(f"\n{'process':44} {'count':>5} {'held MiB':>8} {'grown':>7} {'share':>6} {'replaced':>9}")
    for each in found:
        lived, replaced = ("-" if value is None else f"{value / MIB:.2f}" for value in (each.lived, each.replaced))
        share = "-" if each.share is None else f"{each.share:.1%}"
        print(f"{each.key!s:44} {each.count:>5} {each.held / MIB:>8.1f} {lived:>7} {share:>6} {replaced:>9}")


def report(
    minutes: float,
    records: Sequence[RequestRecord],
    faults: Sequence[Fault],
    grown: Sequence[m.Growth],
    began: float,
    rests: Sequence[m.Window],
) -> dict[str, float | None]:
    """Prints what was found; returns the last line."""
    lanes = summarise(records)
    show_lanes(lanes)
    attempts = explain(records, [(fault.since, fault.until + LATE_S) for fault in faults])
    print(f"\n# attempts that failed in a fault, by code: {dict(attempts.explained.most_common())}")
    kills = [(fault.since, fault.workload) for fault in faults if fault.workload]
    print(f"# under way when a worker of their workload was killed: {dict(under_way(records, kills))}")
    print(f"# attempts that failed without a fault: {len(attempts.unexplained)}")
    for at, lane, code in attempts.unexplained[:20]:
        print(f"#   {at - began:.1f} s {lane}: {code}")
    for record in [each for each in records if each.outcome in (Outcome.WRONG, Outcome.LOST)][:20]:
        print(f"# {record.outcome} at {record.start - began:.1f} s, {record.lane}: {record.detail[:300]}")
    show_growth(grown)
    outcomes = Counter(record.outcome for record in records)
    kinds = Counter(fault.kind for fault in faults)
    figures: dict[str, float | None] = {
        "minutes": round(minutes, 2),
        "requests": len(records),
        "answered": outcomes[Outcome.ANSWERED],
        "refused": outcomes[Outcome.REFUSED],
        "wrong": outcomes[Outcome.WRONG],
        "lost": outcomes[Outcome.LOST],
        "killed_workers": kinds["worker"] + kinds["another worker"],
        "killed_fronts": kinds["front"] + kinds["gateway"],
    }
    for role in ("front", "worker", "supervisor", "coordinator", "gateway"):
        value = m.growth_of_role(grown, role)
        figures[f"growth_{role}"] = None if value is None else round(value / MIB, 2)
    figures["growth_percent"] = round(100 * m.largest_share(grown), 1)
    gaps = longest_gaps(records, [(since - SETTLE_S, until) for since, until in rests])
    print("\n# longest time without an answer, in ms:", {door: round(1e3 * gap) for door, gap in gaps.items()})
    figures["longest_gap_ms"] = round(1e3 * max(gaps.values(), default=0.0))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1, help="of the order of faults, and of the load")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs, requests and samples of memory here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the region is ended
    print(machine_line(), flush=True)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with soak_region(folder, soak_models(folder)) as region:
            load = Load(region, folder, options.seed)
            sampler = m.MemorySampler(region.control)
            try:
                sampler.start()
                began = time.monotonic()
                until = began + 60 * options.minutes
                deck, faults = FaultDeck(region, random.Random(options.seed)), list[Fault]()
                inject_faults(deck, load, faults, began + WARM * (until - began))
                first = load.rest()
                inject_faults(deck, load, faults, until - REST_S)
                last = load.rest()
                ended = time.monotonic()
                load.end()
            finally:
                load.kill()
                memory = sampler.stop()
        records = load.records()
        if options.keep:
            rows = {str(each.key): each.samples for each in memory}
            (folder / "memory.json").write_text(json.dumps(rows))
        grown = m.growths(memory, first, last)
        figures = report((ended - began) / 60, records, faults, grown, began, (first, last))
    print(json.dumps(figures))
    is_whole = all(fault.until < float("inf") for fault in faults)
    if figures["wrong"] or figures["lost"] or not is_whole or m.largest_share(grown) > FLAT:
        sys.exit(1)


if __name__ == "__main__":
    main()
