"""Desired x running."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from harness.builders.agent_values import assignment, at, desired_set, measurement
from shoal.agent.core.assignment import events, machine, states
from shoal.agent.core.reconcile import ReconcilePlan, pinned_digests, plan
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal

LIMITS = states.AssignmentLimits()
SERVICE = states.LoadedModel(measurement(), (), ())


def ready(asked: Assignment) -> states.Ready:
    return states.Ready(asked, states.AssignmentRecord(), at(0), SERVICE)


def gone_state(asked: Assignment) -> states.Gone:
    return states.Gone(asked, states.AssignmentRecord(), at(0))


def test_what_is_new_begins_what_is_not_wanted_drains_what_is_over_is_forgotten() -> None:
    kept, new, old, over = (assignment(name) for name in ("a-kept", "a-new", "a-old", "a-over"))
    running: dict[str, states.State] = {"a-kept": ready(kept), "a-old": ready(old), "a-over": gone_state(over)}
    assert plan((kept, new), running) == ReconcilePlan(begin=(new,), resume=(), drain=("a-old",), forget=("a-over",))


def test_draining_is_asked_and_taken_back() -> None:
    asked = assignment()
    leaving = replace(asked, draining=True)
    assert plan((leaving,), {asked.id: ready(asked)}) == ReconcilePlan((), (), (asked.id,), ())
    draining, _ = machine.step(ready(asked), events.DrainRequested(), at(1), LIMITS)
    assert plan((leaving,), {asked.id: draining}) == ReconcilePlan((), (), (), ())
    assert plan((leaving,), {asked.id: gone_state(asked)}) == ReconcilePlan((), (), (), ()), (
        "told as gone until it is unassigned"
    )
    assert plan((asked,), {asked.id: draining}) == ReconcilePlan((), (asked,), (), ())
    assert plan((asked,), {asked.id: gone_state(asked)}) == ReconcilePlan((), (asked,), (), ())
    assert plan((leaving,), {}) == ReconcilePlan((), (), (), ())


def test_new_terms_reach_the_replica_without_a_restart() -> None:
    asked = assignment()
    assert plan((replace(asked, revision=2),), {asked.id: ready(asked)}).resume == (replace(asked, revision=2),)


def test_an_id_that_changed_its_meaning_is_drained_and_begun_again() -> None:
    asked = assignment()
    other = replace(asked, device="gpu0")
    assert plan((other,), {asked.id: ready(asked)}) == ReconcilePlan((), (), (asked.id,), ())
    assert plan((other,), {asked.id: gone_state(asked)}) == ReconcilePlan((), (other,), (), ())


assignments = st.builds(
    assignment,
    st.sampled_from([f"a-{number}" for number in range(5)]),
    draining=st.booleans(),
    revision=st.integers(1, 2),
)
sets = st.lists(assignments, unique_by=lambda each: each.id, max_size=5).map(tuple)
state_names = st.sampled_from(["fetching", "ready", "draining", "failed", "poisoned", "gone"])


def in_state(asked: Assignment, name: str) -> states.State:
    asked = replace(asked, draining=False)
    refusal = Refusal(Code.LOAD_FAILED)
    match name:
        case "fetching":
            return machine.begin(asked, at(0), LIMITS)[0]
        case "draining":
            return machine.step(ready(asked), events.DrainRequested(), at(0), LIMITS)[0]
        case "failed":
            return states.Failed(asked, states.AssignmentRecord(), at(0), refusal, at(9))
        case "poisoned":
            return states.Poisoned(asked, states.AssignmentRecord(), at(0), refusal)
        case "gone":
            return gone_state(asked)
        case _:
            return ready(asked)


@given(sets, st.dictionaries(st.sampled_from([f"a-{number}" for number in range(5)]), state_names))
def test_carried_out_it_settles(wanted: tuple[Assignment, ...], found: dict[str, str]) -> None:
    """Plan, carry out, plan again: only forgetting is left; what is wanted is there and nothing else stays."""
    running = {name: in_state(assignment(name), state) for name, state in found.items()}
    for _ in range(3):
        todo = plan(wanted, running)
        for asked in todo.begin:
            running[asked.id] = machine.begin(asked, at(1), LIMITS)[0]
        for asked in todo.resume:
            running[asked.id] = machine.step(running[asked.id], events.ResumeRequested(asked), at(1), LIMITS)[0]
        for name in todo.drain:
            running[name] = machine.step(running[name], events.DrainRequested(), at(1), LIMITS)[0]
        for name in todo.forget:
            del running[name]
        running = {
            name: machine.step(state, events.Idle(), at(2), LIMITS)[0] if isinstance(state, states.Draining) else state
            for name, state in running.items()
        }
    assert plan(wanted, running) == ReconcilePlan((), (), (), ())
    alive = {name for name, state in running.items() if not isinstance(state, states.Gone)}
    assert alive == {asked.id for asked in wanted if not asked.draining}


def test_pins_are_what_is_asked_for_assigned_or_in_use() -> None:
    asked, old = assignment("a-1", model="sha256:1"), assignment("a-2", model="sha256:2")
    over = assignment("a-3", model="sha256:3")
    running: dict[str, states.State] = {"a-1": ready(asked), "a-2": ready(old), "a-3": gone_state(over)}
    assert pinned_digests(desired_set(1, asked, pins=("sha256:9",)), running) == {"sha256:1", "sha256:2", "sha256:9"}
    assert pinned_digests(None, running) == {"sha256:1", "sha256:2"}
