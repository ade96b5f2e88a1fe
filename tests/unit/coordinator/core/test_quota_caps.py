"""What a tenant over its quota keeps: as its rule says it, one replica after the other, and in time that is linear."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import fleet_of, inputs, intent, node
from shoal.coordinator.core.placement.allocations import QuotaCaps
from shoal.coordinator.core.placement.feasible import Scope
from shoal.coordinator.core.placement.replicas import CurrentReplica, WorkloadReplicas
from shoal.types.units import Bytes
from shoal.types.workload import Intent, Quota, Spread, Standby, WorkloadKey

Workloads = Sequence[tuple[Intent, WorkloadReplicas]]


class CountedAssignment:
    """Counts how often anybody asks what memory any replica takes."""

    asked = 0

    def __init__(self, name: str, memory: int) -> None:
        self.id = name
        self._memory = Bytes(memory)

    @property
    def memory_bytes(self) -> Bytes:
        CountedAssignment.asked += 1
        return self._memory


def replica(name: str, memory: int, at: str = "") -> CurrentReplica:
    """at: the node that it is on, where it matters."""
    option = SimpleNamespace(domain=lambda spread: at if spread is Spread.NODE else "")
    return cast("CurrentReplica", SimpleNamespace(assignment=CountedAssignment(name, memory), option=option))


def scope_of(quotas: Mapping[str, Quota]) -> Scope:
    return Scope(inputs(fleet_of(node("a")), quotas=quotas))


class PlainCaps:
    """The rule as it is said: the lowest-ranked workload with more than one replica gives one up, repeatedly, then
    each its last one. Everything is summed up for each."""

    def __init__(self, quotas: Mapping[str, Quota], workloads: Workloads) -> None:
        self._quotas = quotas
        self._may_stay: dict[WorkloadKey, tuple[CurrentReplica, ...]] = {}
        self._uncapped = dict[WorkloadKey, int]()
        for each, current in workloads:
            places = dict[str, CurrentReplica]()
            for one in current.active:
                places.setdefault(cast("str", one.option.domain(each.require.spread)) or one.assignment.id, one)
            self._may_stay[each.key] = (*places.values(), *current.standbys)
            asked = each.require.replicas + (each.require.standby is not Standby.NONE)
            self._uncapped[each.key] = min(len(self._may_stay[each.key]), asked)
        self._decided = set[WorkloadKey]()

    def of(self, workload: WorkloadKey) -> int:
        caps, quota = dict(self._uncapped), self._quotas.get(workload.tenant, Quota(""))
        mine = [key for key in caps if key.tenant == workload.tenant]
        while self._exceeds(quota, mine, caps):
            undecided = [key for key in mine if caps[key] > 0 and key not in self._decided]
            several = [key for key in undecided if caps[key] > 1]
            if not undecided:
                break
            caps[(several or undecided)[-1]] -= 1
        return caps[workload]

    def decide(self, workload: WorkloadKey, kept: Collection[str]) -> None:
        stays = tuple(each for each in self._may_stay[workload] if each.assignment.id in kept)
        self._may_stay[workload], self._uncapped[workload] = stays, len(stays)
        self._decided.add(workload)

    def choices(self, workload: WorkloadKey) -> list[str]:
        return [each.assignment.id for each in self._may_stay[workload]]

    def _exceeds(self, quota: Quota, workloads: Sequence[WorkloadKey], caps: Mapping[WorkloadKey, int]) -> bool:
        kept = [each for key in workloads for each in self._may_stay[key][: caps[key]]]
        memory = sum(each.assignment.memory_bytes for each in kept)
        return (quota.replicas is not None and len(kept) > quota.replicas) or (
            quota.memory is not None and memory > quota.memory
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A region over its quotas."""

    # Of some of the tenants.
    quotas: Mapping[str, Quota]
    # By descending rank.
    workloads: Workloads


@st.composite
def cases(draw: st.DrawFn) -> Case:
    few, memory = st.integers(0, 3), st.integers(0, 9)
    workloads = list[tuple[Intent, WorkloadReplicas]]()
    for at in range(draw(st.integers(1, 8))):
        asked = intent(
            f"w{at}", tenant=draw(st.sampled_from(["shop", "lab"])), replicas=draw(st.integers(1, 3)),
            spread=draw(st.sampled_from([Spread.NONE, Spread.NODE])),
            standby=draw(st.sampled_from([Standby.NONE, Standby.WARM])),
        )  # fmt: skip
        active = [replica(f"{at}-{each}", draw(memory), draw(st.sampled_from("ab"))) for each in range(draw(few))]
        spare = [replica(f"{at}-s", draw(memory))] if draw(st.booleans()) else []
        workloads.append((asked, WorkloadReplicas(tuple(active), (), tuple(spare))))
    most = st.one_of(st.none(), st.integers(0, 12))
    size = st.one_of(st.none(), st.integers(0, 40).map(Bytes))
    tenants = draw(st.lists(st.sampled_from(["shop", "lab"]), unique=True))
    return Case({each: Quota(each, replicas=draw(most), memory=draw(size)) for each in tenants}, workloads)


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_caps_are_those_of_the_rule_whatever_the_decided_workloads_kept(case: Case, data: st.DataObject) -> None:
    """A workload keeps no more than its cap, of any of its replicas, or is not decided at all. A copy is not changed by
    what is decided elsewhere."""
    plain, first = PlainCaps(case.quotas, case.workloads), QuotaCaps(scope_of(case.quotas), case.workloads)
    caps = first.copy()
    at_first = [plain.of(each.key) for each, _ in case.workloads]
    for each, _ in case.workloads:
        cap = caps.of(each.key)
        assert cap == plain.of(each.key)
        if data.draw(st.booleans(), "decided"):
            choices = data.draw(st.permutations(plain.choices(each.key)), "order")
            kept = set(choices[: data.draw(st.integers(0, cap), "kept")])
            caps.decide(each.key, kept)
            plain.decide(each.key, kept)
    assert [first.of(each.key) for each, _ in case.workloads] == at_first


def test_a_plan_of_a_tenant_far_over_its_quota_looks_at_each_replica_a_few_times() -> None:
    """With two replicas of each of 200 workloads, the sums of the rule would be asked for 400 replicas 7,000,000
    times."""
    workloads = [
        (
            intent(f"w{at:03}", replicas=2, spread=Spread.NONE),
            WorkloadReplicas((replica(f"{at}-0", 1), replica(f"{at}-1", 1)), ()),
        )
        for at in range(200)
    ]
    CountedAssignment.asked = 0
    caps = QuotaCaps(scope_of({"shop": Quota("shop", memory=Bytes(50))}), workloads)
    given_caps = list[int]()
    for each, current in workloads:
        given_caps.append(caps.of(each.key))
        caps.decide(each.key, {one.assignment.id for one in current.active[: given_caps[-1]]})
    assert given_caps == [1] * 50 + [0] * 150
    assert CountedAssignment.asked <= 10 * 400
