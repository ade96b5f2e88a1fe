"""What begins of all that something speaks for: laws over any signal, for hours."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import DIGEST, START, intent
from shoal.coordinator.core.migration.budget import (
    REGION_MOST,
    RETURN_MEMORY_S,
    SUSTAINED_S,
    TENANT_MOST,
    UNPLACED_COOLDOWN_S,
    UNSEEN_EXPIRY_S,
    URGENT_MOST,
    HoldReason,
    select_moves,
)
from shoal.coordinator.core.migration.model import (
    AbortedState,
    Cause,
    DoneState,
    ExpectedOutcome,
    Migration,
    MigrationStage,
    MoveProposal,
    PlannedState,
    PreparingState,
    ReplicaPlace,
    RequestStats,
    ServiceFigures,
    ShiftingState,
    StageEntry,
)
from shoal.coordinator.core.migration.triggers import TriggerScan
from shoal.coordinator.core.migration.triggers.view import pending_key
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.core.workloads.model import PendingMove
from shoal.types.codes import Code, Refusal
from shoal.types.migration import MigrationRule
from shoal.types.units import Bytes, Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

COOLDOWN_S = 300.0
MOVE_S = 20.0
LOOK_S = 5.0
HOUR_S = 3600.0
RULE = MigrationRule(automatic=True, cooldown_s=Seconds(COOLDOWN_S))


class Plain:
    """Workloads of one replica each on two nodes, each on a device of its own there, unless `together`, moved by
    nothing but the budget. A move takes MOVE_S, and finds its place at once. prepared: nodes make their models."""

    def __init__(
        self,
        workloads: int = 1,
        rule: MigrationRule = RULE,
        *,
        together: bool = False,
        prepared: bool = False,
        others: int = 0,
    ) -> None:
        """others: further workloads, of another tenant."""
        self.keys = [WorkloadKey("shop", f"w{number}") for number in range(workloads)]
        self.keys += [WorkloadKey("bank", f"o{number}") for number in range(others)]
        self.intents = {key: replace(intent(key.name, tenant=key.tenant), migration=rule) for key in self.keys}
        devices = {key: "cpu0" if together else f"cpu{number}" for number, key in enumerate(self.keys)}
        self.at = {
            key: ReplicaPlace(f"a-{key.name}-0", "edge-0", devices[key], DIGEST, "fp16", prepared=prepared)
            for key in self.keys
        }
        self.migrations: dict[str, Migration] = {}
        self.pending: dict[str, PendingMove] = {}
        self.now = 0.0
        self.holds: list[HoldReason] = []

    def look(
        self,
        *wanted: WorkloadKey,
        fails: bool = False,
        cause: Cause = Cause.PRICE,
        urgent: bool = False,
        waits: bool = False,
        seen: bool = True,
    ) -> None:
        """One look at which these workloads' replicas would be better on their other node. seen: it sees any at all."""
        now, wall = Elapsed(self.now), Wall(START + self.now)
        self._go_on(fails=fails)
        found = tuple(self._proposal(key, cause, urgent=urgent, waits=waits) for key in wanted if not self._moves(key))
        judged = frozenset(pending_key(self.at[key], "objective") for key in self.keys if seen and not self._moves(key))
        assigned = frozenset(place.assignment for place in self.at.values())
        looked = assigned if seen else frozenset[str]()

        def allot_moves() -> tuple[Migration, ...]:
            allotted = select_moves(
                TriggerScan(found, judged, looked), self.pending, assigned, self.migrations, self.intents, now, wall
            )
            self.pending = dict(allotted.pending)
            self.holds = [each.hold for each in allotted.move_holds]
            return tuple(migration for migration, _ in allotted.started_moves)

        begun = allot_moves()
        self.migrations |= {each.id: each for each in begun}
        assert not (begun and allot_moves()), "asked again, it begins nothing more"
        self.now += LOOK_S

    def _proposal(self, key: WorkloadKey, cause: Cause, *, urgent: bool, waits: bool) -> tuple[str, MoveProposal]:
        place = self.at[key]
        other = "edge-1" if place.node == "edge-0" else "edge-0"
        expected = ExpectedOutcome(ServiceFigures(), ServiceFigures(), 0.5, Bytes(0), Seconds(1.0))
        proposal = MoveProposal(
            key,
            place,
            Aim(other, place.device, place.variant),
            cause,
            "cheaper",
            expected,
            is_urgent=urgent,
            is_deferred=waits,
        )
        return pending_key(place, "objective"), proposal

    def _moves(self, key: WorkloadKey) -> bool:
        return any(each.workload == key and not each.is_over for each in self.migrations.values())

    def _go_on(self, *, fails: bool) -> None:
        for name, each in self.migrations.items():
            if each.is_over:
                continue
            wall = Wall(START + self.now)
            if isinstance(each.state, PlannedState):
                target = replace(each.source, assignment=f"a-{name}", node=each.aim.node)
                state = PreparingState(MigrationStage.RESERVED, Elapsed(self.now), Elapsed(self.now + HOUR_S))
                self.migrations[name] = each = replace(each, target=target, state=state)
            if START + self.now < each.stages[0].at + MOVE_S:
                continue
            if fails:
                ended = AbortedState(Refusal(Code.GUARD_TRIPPED), Elapsed(self.now))
                self.migrations[name] = replace(
                    each, state=ended, stages=(*each.stages, StageEntry(MigrationStage.ABORTED, wall))
                )
                continue
            assert each.target is not None
            self.at[each.workload] = each.target
            story = (*each.stages, StageEntry(MigrationStage.DONE, wall))
            self.migrations[name] = replace(each, state=DoneState(Elapsed(self.now)), stages=story)

    @property
    def live(self) -> list[Migration]:
        return [each for each in self.moves if not each.is_over]

    @property
    def moves(self) -> list[Migration]:
        return sorted(self.migrations.values(), key=lambda each: each.stages[0].at)


@settings(max_examples=60, deadline=None)
@given(signal=st.lists(st.tuples(st.booleans(), st.integers(1, 60)), min_size=1, max_size=40), fails=st.booleans())
def test_moves_of_a_workload_are_apart_by_its_cooldown_whatever_the_signal_does(
    signal: list[tuple[bool, int]], fails: bool
) -> None:
    plain = Plain()
    (key,) = plain.keys
    held = list[tuple[float, bool]]()
    for holds, looks in signal:
        for _ in range(looks):
            held.append((plain.now, holds))
            plain.look(*([key] if holds else []), fails=fails)
    for before, after in pairwise(plain.moves):
        assert after.stages[0].at - before.stages[-1].at >= COOLDOWN_S
    for each in plain.moves:
        began = each.stages[0].at - START
        assert all(holds for at, holds in held if began - SUSTAINED_S <= at <= began), "it held for a while before"


@pytest.mark.parametrize("prepared", [False, True])
def test_a_signal_that_never_rests_moves_a_workload_to_and_fro_ever_less(*, prepared: bool) -> None:
    plain = Plain(prepared=prepared)
    (key,) = plain.keys
    while plain.now < 3 * HOUR_S:
        plain.look(key)
    ended = [each.stages[-1].at for each in plain.moves]
    waits = [after.stages[0].at - before.stages[-1].at for before, after in pairwise(plain.moves)]
    for number, wait in enumerate(waits[:3]):
        assert wait >= COOLDOWN_S * 2**number
    assert max(sum(at < each <= at + RETURN_MEMORY_S for each in ended) for at in ended) <= 5
    assert min(waits[3:]) > HOUR_S / 4
    assert len(waits) >= 4, "it is not held for ever"


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_so_many_of_a_region_move_at_once_and_the_others_have_their_turn(data: st.DataObject) -> None:
    plain = Plain(workloads=9)
    for _ in range(60):
        plain.look(*data.draw(st.lists(st.sampled_from(plain.keys), unique=True)) or plain.keys)
        assert sum(not each.is_over for each in plain.migrations.values()) <= REGION_MOST
    plain = Plain(workloads=9)
    for _ in range(40):
        plain.look(*plain.keys)
    assert {each.workload for each in plain.moves} == set(plain.keys)


def shift(plain: Plain) -> None:
    """The new replicas of all live moves take requests, for an hour."""
    for each in plain.live:
        begun, end = Elapsed(plain.now), Elapsed(plain.now + HOUR_S)
        state = ShiftingState(0, RequestStats(), RequestStats(), begun, end, end)
        story = (*each.stages, StageEntry(MigrationStage.SHIFTING, Wall(START + plain.now + HOUR_S)))
        target = replace(each.source, assignment=f"a-{each.id}", node=each.aim.node)
        plain.migrations[each.id] = replace(each, stages=story, state=state, target=target)


@pytest.mark.parametrize("cause", [Cause.HEAT, Cause.SLO, Cause.PRICE])
def test_long_moves_of_one_tenant_keep_another_waiting_for_no_longer_than_they_load(cause: Cause) -> None:
    plain = Plain(workloads=TENANT_MOST + 1, others=1)
    *mine, other = plain.keys
    while not plain.moves:
        plain.look(*mine)
    assert len(plain.live) == REGION_MOST
    plain.look(*mine, other, cause=cause)
    assert set(plain.holds) == {HoldReason.REGION}
    for each in plain.live:
        plain.migrations[each.id] = replace(each, stages=(replace(each.stages[0], at=Wall(START + 2 * HOUR_S)),))
    shift(plain)
    for _ in range(4):
        plain.look(*mine, other, cause=cause)
    assert [each.workload for each in plain.live if each.workload.tenant == "bank"] == [other]
    assert sum(each.workload.tenant == "shop" for each in plain.live) == TENANT_MOST, "its fifth waits for its own"


def test_moves_between_regions_take_no_turn_from_those_inside() -> None:
    plain = Plain(workloads=REGION_MOST + 1)
    for key in plain.keys[1:]:
        place = replace(plain.at[key], assignment=f"g-{key.name}", node="", region="us-east")
        state = PlannedState(Elapsed(0.0), Elapsed(HOUR_S))
        cross_region = Migration(f"x-{key.name}", key, Cause.FAILBACK, "", place, Aim(region="eu-west"), RULE, state)
        plain.migrations[cross_region.id] = replace(
            cross_region, stages=(StageEntry(MigrationStage.PLANNED, Wall(START)),)
        )
    for _ in range(4):
        plain.look(plain.keys[0])
    assert sum(each.is_cross_region and not each.is_over for each in plain.moves) == REGION_MOST
    assert [each.workload for each in plain.moves if not each.is_cross_region] == [plain.keys[0]]


def test_what_has_a_deadline_waits_for_nothing_but_its_own_workload() -> None:
    plain = Plain()
    (key,) = plain.keys
    plain.look(key, urgent=True)
    assert len(plain.moves) == 1
    for _ in range(5):
        plain.look(key, urgent=True)
    assert len(plain.moves) == 2, "the cooldown does not bind it"


def test_what_holds_a_move_back_is_told_once() -> None:
    plain = Plain()
    (key,) = plain.keys
    for _ in range(12):
        plain.look(key)
    assert plain.holds == [HoldReason.COOLDOWN]
    assert [each.told for each in plain.pending.values()] == ["cooldown"]


def test_one_at_a_time_looks_for_room_on_a_device() -> None:
    plain = Plain(workloads=3, together=True)
    while not plain.moves:
        plain.look(*plain.keys)
    assert len(plain.moves) == 1, "what it takes there is not in the books yet"
    assert set(plain.holds) == {HoldReason.OTHERS}
    plain.look(*plain.keys)
    assert len(plain.live) == 2, "the first has its place"


def test_a_move_that_finds_no_room_gives_up_soon_and_rests_a_little() -> None:
    plain = Plain()
    (key,) = plain.keys
    while not plain.moves:
        plain.look(key)
    (begun,) = plain.moves
    assert isinstance(begun.state, PlannedState)
    assert begun.state.until - begun.state.since <= 3 * LOOK_S
    full = AbortedState(Refusal(Code.NO_ROOM_FOR_BOTH), Elapsed(plain.now))
    plain.migrations[begun.id] = replace(begun, state=full)
    since = plain.now
    while len(plain.moves) < 2:
        plain.look(key)
    again = plain.moves[1].stages[0].at - START
    assert UNPLACED_COOLDOWN_S <= again - since <= UNPLACED_COOLDOWN_S + LOOK_S < COOLDOWN_S


def test_what_has_a_deadline_has_a_bound_of_its_own() -> None:
    plain = Plain(workloads=URGENT_MOST + 3)
    plain.look(*plain.keys, urgent=True, cause=Cause.WAKE)
    assert len(plain.live) == URGENT_MOST
    assert plain.holds.count(HoldReason.REGION) == 3


def test_devices_that_may_sleep_give_up_theirs_one_after_the_other() -> None:
    plain = Plain(workloads=3)
    for _ in range(30):
        plain.look(*plain.keys, cause=Cause.CONSOLIDATION)
        assert len(plain.live) <= 1
    assert {each.workload for each in plain.moves} == set(plain.keys)


def test_what_waits_for_its_turn_has_held_meanwhile() -> None:
    plain = Plain()
    (key,) = plain.keys
    for _ in range(4):
        plain.look(key, waits=True)
    assert not plain.moves
    assert plain.holds == [HoldReason.TURN]
    plain.look(key)
    assert len(plain.moves) == 1


def test_what_nobody_could_see_for_long_has_not_held_meanwhile() -> None:
    for blind, begins in ((UNSEEN_EXPIRY_S - LOOK_S, True), (UNSEEN_EXPIRY_S + LOOK_S, False)):
        plain = Plain()
        (key,) = plain.keys
        plain.look(key)
        for _ in range(int(blind / LOOK_S)):
            plain.look(seen=False)
        plain.look(key)
        assert bool(plain.moves) is begins
