"""The pure parts of `shoal bench soak`: how requests are accounted for, and what counts as growth."""

import importlib
import math
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).parents[3] / "benchmarks"
MIB = 2**20
FIRST, LAST = (20.0, 35.0), (85.0, 100.0)


class Soak(NamedTuple):
    """Its modules."""

    outcomes: Any
    memory: Any


@pytest.fixture(scope="module")
def soak() -> Iterator[Soak]:
    """Its own folder comes first, as when it is run. Nothing of it stays for other tests."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield Soak(importlib.import_module("_soak.outcomes"), importlib.import_module("_soak.memory"))
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if name.startswith("_soak"):
                del sys.modules[name]


def process(soak: Soak, samples: Sequence[tuple[float, float]], serves: str = "") -> Any:
    """samples: (time, MiB)."""
    key = soak.memory.ProcessKey("worker" if serves else "front", "agent-1", serves)
    rows = [(at, int(mib * MIB), int(mib * MIB)) for at, mib in samples]
    return soak.memory.ProcessMemory(key, samples[0][0], rows)


# requests


def record(soak: Soak, end: float, outcome: str, detail: str = "", **more: Any) -> Any:
    said = {"lane": "unary", "door": "gateway", "model": "small", "start": 0.0, "failures": (), **more}
    return soak.outcomes.RequestRecord(end=end, outcome=soak.outcomes.Outcome(outcome), detail=detail, **said)


def test_a_record_is_read_as_it_was_written(soak: Soak) -> None:
    written = record(soak, 2.5, "lost", 'say "why"', failures=((1.75, "BROKEN"), (2.0, "OVERLOADED")))
    assert soak.outcomes.RequestRecord.from_line(written.to_line()) == written


def test_a_lane_counts_every_request_once_and_times_only_answers(soak: Soak) -> None:
    found = soak.outcomes.summarise([
        record(soak, 1.0, "answered", failures=((0.5, "BROKEN"),)),
        record(soak, 9.0, "refused", "TENANT_RATE"),
        record(soak, 3.0, "answered"),
        record(soak, 6.0, "cancelled", door="agent-1"),
    ])  # fmt: skip
    assert list(found) == ["unary small agent-1", "unary small gateway"]
    cancelled, lane = found.values()
    assert (lane.outcomes, lane.repeated) == ({"answered": 2, "refused": 1}, 1)
    assert (lane.p50_s, lane.most_s) == (2.0, 3.0)
    assert math.isnan(cancelled.p50_s)


def test_a_gap_is_between_answers_to_anybody_at_one_door(soak: Soak) -> None:
    found = soak.outcomes.longest_gaps([
        record(soak, 5.0, "answered"),
        record(soak, 1.0, "answered", lane="stream"),
        record(soak, 2.0, "refused", "OVERLOADED"),
        record(soak, 3.0, "answered", door="agent-1"),
    ])  # fmt: skip
    assert found == {"gateway": 4.0, "agent-1": 0.0}


def test_while_nobody_asks_there_is_no_gap(soak: Soak) -> None:
    records = [record(soak, at, "answered") for at in (1.0, 3.0, 21.0, 24.0)]
    assert soak.outcomes.longest_gaps(records, [(4.0, 20.0)]) == {"gateway": 3.0}
    assert soak.outcomes.longest_gaps(records, [(0.0, 25.0)]) == {"gateway": 0.0}


def test_what_is_under_way_at_a_kill_is_of_the_killed_worker_s_workload(soak: Soak) -> None:
    found = soak.outcomes.under_way(
        [
            record(soak, 5.0, "answered"),
            record(soak, 5.0, "crashed", "REQUEST_CRASHED_WORKER"),
            record(soak, 1.0, "answered"),
            record(soak, 5.0, "answered", start=3.0),
            record(soak, 5.0, "answered", model="other"),
        ],
        [(2.0, "small"), (2.5, "small")],
    )
    assert found == {"answered": 1, "crashed": 1}


def test_what_fails_while_no_fault_is_on_is_listed(soak: Soak) -> None:
    records = [
        record(soak, 30.0, "answered", failures=((10.5, "WORKER_CRASHED"), (25.0, "BROKEN"))),
        record(soak, 14.0, "refused", "SESSION_LOST", lane="session", start=11.0),
        record(soak, 40.0, "refused", "SESSION_LOST", lane="session", start=39.0),
        record(soak, 40.0, "refused", "SESSION_LOST", lane="bad"),
        record(soak, 40.0, "refused", "DEADLINE_EXCEEDED"),
    ]
    found = soak.outcomes.explain(records, [(10.0, 12.0), (50.0, math.inf)])
    assert found.explained == {"WORKER_CRASHED": 1, "SESSION_LOST": 1}
    assert found.unexplained == [
        (25.0, "unary small gateway", "BROKEN"),
        (40.0, "session small gateway", "SESSION_LOST"),
    ]


# memory


@given(slope=st.floats(-0.1, 0.1), outliers=st.sets(st.integers(0, 100), max_size=6), size=st.floats(-50, 50))
def test_what_is_held_is_what_most_samples_say(soak: Soak, slope: float, outliers: set[int], size: float) -> None:
    samples = [(float(at), 100 + slope * at + size * (at in outliers)) for at in range(101)]
    early, late = soak.memory.medians_in(process(soak, samples), FIRST, LAST)
    assert (late - early) / MIB == pytest.approx(65 * slope, abs=0.2 + 0.2 * abs(65 * slope))


@pytest.mark.parametrize(("since", "until"), [(0, 80), (30, 100), (95, 100)])
def test_only_what_lived_through_both_windows_has_grown(soak: Soak, since: int, until: int) -> None:
    samples = [(float(at), 100.0) for at in range(since, until + 1)]
    assert soak.memory.medians_in(process(soak, samples), FIRST, LAST) is None


def test_processes_that_replaced_each_other_are_compared_at_equal_age(soak: Soak) -> None:
    """Each grows by a MiB a second, and begins 2 MiB above the one before; the third did not live long enough."""
    lives = [(0, 60, 100), (60, 100, 102), (100, 110, 500), (110, 160, 104)]
    each = [
        process(soak, [(float(born + age), start + age) for age in range(end - born)]) for born, end, start in lives
    ]
    assert soak.memory.growth_of_replaced(each) / MIB == pytest.approx(4.0, abs=0.5)
    assert soak.memory.growth_of_replaced(each[:1]) is None
    assert soak.memory.growth_of_replaced(each[1:3]) is None


def test_the_growth_of_a_role_is_that_of_its_worst_process(soak: Soak) -> None:
    lived = [process(soak, [(float(at), 100 + slope * at) for at in range(101)], name) for name, slope in
             (("default/a", 0.0), ("default/b", 0.1))]  # fmt: skip
    replaced = [process(soak, [(float(at), 100.0 + born) for at in range(born, born + 50)]) for born in (0, 50)]
    found = soak.memory.growths([*lived, *replaced], FIRST, LAST)
    assert [str(each.key) for each in found] == [
        "agent-1/front",
        "agent-1/worker default/a",
        "agent-1/worker default/b",
    ]
    assert [each.count for each in found] == [2, 1, 1]
    assert soak.memory.growth_of_role(found, "worker") / MIB == pytest.approx(6.5)
    assert soak.memory.growth_of_role(found, "front") / MIB == pytest.approx(50.0)
    assert soak.memory.growth_of_role(found, "gateway") is None
    assert soak.memory.largest_share(found) == pytest.approx(6.5 / 102.75)
    assert soak.memory.largest_share(found[:1]) == 0.0


def test_a_process_holds_what_it_allocated_and_no_mapped_file(soak: Soak, tmp_path: Path) -> None:
    size = 8 * MIB
    (tmp_path / "file").write_bytes(bytes(size))
    resident, held = soak.memory.read_memory(os.getpid())
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        assert not any(mapped[at] for at in range(0, size, mmap.PAGESIZE))
        mapped_resident, mapped_held = soak.memory.read_memory(os.getpid())
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own:
        own.write(b"1" * size)
        _, own_held = soak.memory.read_memory(os.getpid())
    assert mapped_resident - resident > size / 2
    assert abs(mapped_held - held) < size / 4
    assert own_held - held > size / 2


def test_a_worker_is_known_by_what_it_serves_and_a_gateway_s_front_by_its_machine(soak: Soak) -> None:
    def key(role: str, pid: int, member: str) -> str:
        return str(soak.memory.key_of({"role": role, "pid": pid, "member": member, "name": member}, {7: "default/a"}))

    assert key("worker", 7, "agent") == "agent/worker default/a"
    assert key("worker", 8, "agent") == "agent/other"
    assert key("front", 9, "agent") == "agent/front"
    assert key("front", 9, "gateway") == "gateway/gateway"
