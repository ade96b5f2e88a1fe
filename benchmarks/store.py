"""What a transaction costs in SQLite, and in etcd with one and with three members, on this disk: `shoal bench store`.

Each store takes the transactions of one step of a region: a compare-and-set on the region's record, one desired set of
2 KiB and one event. First one writer, sequentially, then eight at once; then reads of one record, and lists of a
thousand. etcd is the host's, with TLS and client certificates. Figures are ratios to SQLite's in the same run.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.coordinator.ports import Store, Transaction
from shoal.coordinator.store.sqlite import SqliteStore

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.servers.etcd import etcd

VALUE = b"x" * 2048
AT_ONCE = 8
LISTED = 1000


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """What one store needs for the operations of a coordinator."""

    # Median seconds of a commit with one writer.
    commit_p50_s: float
    # p99 seconds of a commit with one writer.
    commit_p99_s: float
    # Commits a second with one writer.
    commits_per_s: float
    # Commits a second with `AT_ONCE` writers.
    commits_at_once_per_s: float
    # Median seconds to read one record.
    read_p50_s: float
    # Median seconds to list `LISTED` records.
    list_s: float


async def measure(store: Store, count: int) -> StoreFigures:
    fence = await store.commit(Transaction({"region": b"1"}))
    number = 0

    async def commit() -> None:
        nonlocal number
        number += 1
        puts = {f"desired/edge-{number % 50}": VALUE, f"events/{number:012}": VALUE[:200]}
        await store.commit(Transaction(puts, expect={"region": fence}))

    async def several() -> None:
        for _ in range(count // AT_ONCE):
            await commit()

    for _ in range(20):
        await commit()
    commits = [await _time_call(commit) for _ in range(count)]
    began = time.perf_counter()
    await asyncio.gather(*(several() for _ in range(AT_ONCE)))
    at_once_s = time.perf_counter() - began
    reads = [await _time_call(lambda: store.read("desired/edge-7")) for _ in range(count)]
    await store.commit(Transaction({f"list/{key:06}": VALUE[:200] for key in range(LISTED)}))
    lists = [await _time_call(lambda: store.scan("list/")) for _ in range(10)]
    return StoreFigures(
        statistics.median(commits),
        statistics.quantiles(commits, n=100)[98],
        count / sum(commits),
        count // AT_ONCE * AT_ONCE / at_once_s,
        statistics.median(reads),
        statistics.median(lists),
    )


async def _time_call(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def run(count: int, scratch: Path) -> dict[str, StoreFigures]:
    figures = {}
    sqlite = await SqliteStore.open(scratch / "sqlite")
    figures["sqlite"] = await measure(sqlite, count)
    await sqlite.close()
    with ExitStack() as stack:
        for members in (1, 3):
            cluster = stack.enter_context(etcd(scratch / f"etcd-{members}", members=members))
            store = await cluster.open(scratch / f"client-{members}")
            figures[f"etcd x{members}"] = await measure(store, count)
            await store.close()
            cluster.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="transactions of each kind")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", dir=Path.cwd()) as scratch:
        figures = asyncio.run(run(arguments.count, Path(scratch)))
    if arguments.json:
        print(json.dumps({name: asdict(each) for name, each in figures.items()}, indent=1))
        return
    base = figures["sqlite"]
    columns = f"{'commit p50':>11} {'p99':>9} {'commits/s':>10} {'8 at once':>10} {'read p50':>9} {'list 1000':>10}"
    print(f"{'store':10} {columns}   commits/s to SQLite's: one, eight writers")
    for name, each in figures.items():
        print(
            f"{name:10} {each.commit_p50_s * 1e3:8.2f} ms {each.commit_p99_s * 1e3:6.1f} ms {each.commits_per_s:10.0f} "
            f"{each.commits_at_once_per_s:10.0f} {each.read_p50_s * 1e3:6.2f} ms {each.list_s * 1e3:7.1f} ms   "
            f"{each.commits_per_s / base.commits_per_s:.2f}, "
            f"{each.commits_at_once_per_s / base.commits_at_once_per_s:.2f}"
        )


if __name__ == "__main__":
    main()
