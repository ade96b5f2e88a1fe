"""The order between tenants where more want to be served than a front takes."""

from collections import Counter, deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.core.fair_queue import ACTIVE_S, FairQueue, WaitingRequest
from shoal.types.units import Elapsed

NOW = Elapsed(0.0)
"""Nobody is alone yet."""


def fill(queue: FairQueue, tenant: str, count: int) -> list[WaitingRequest]:
    """Ask `count` times; returns those that wait."""
    return [queue.wait(tenant) for _ in range(count) if not queue.enter(tenant, NOW)]


def serve(queue: FairQueue, inside: Sequence[str], count: int) -> list[str]:
    """Answer `count` requests, in the order in which they got in; returns whose turns came."""
    served, turns = deque(inside), list[str]()
    for _ in range(count):
        admitted = [each.tenant for each in queue.leave(served.popleft())]
        served += admitted
        turns += admitted
    return turns


def test_a_tenant_alone_never_waits() -> None:
    queue = FairQueue(8)
    assert len(fill(queue, "a", 10)) == 2, "another may have asked just before"
    assert (queue.inside, queue.waiting) == (8, 2)
    later = Elapsed(ACTIVE_S + 0.1)
    assert not queue.enter("a", later), "it keeps its order"
    waiting = queue.wait("a")
    assert queue.leave("a")[-1] is waiting
    assert all(queue.enter("a", later) for _ in range(50))
    assert (queue.inside, queue.waiting) == (60, 0)


def test_one_alone_is_so_no_more_once_another_asks_and_for_a_while_after() -> None:
    queue = FairQueue(8)
    later = Elapsed(ACTIVE_S + 0.1)
    assert queue.enter("a", NOW)
    assert all(queue.enter("a", later) for _ in range(20))
    assert queue.enter("b", later)
    queue.leave("b")
    assert not queue.enter("a", later)
    assert queue.enter("a", Elapsed(later + ACTIVE_S + 0.1))


def test_one_that_joins_does_not_wait_for_what_the_first_holds() -> None:
    queue = FairQueue(8)
    fill(queue, "a", 100)
    assert len(fill(queue, "b", 6)) == 2, "half of the slots are its share"
    assert queue.inside == 12


def test_what_the_first_holds_beyond_its_share_comes_back_as_its_requests_end() -> None:
    queue = FairQueue(8)
    fill(queue, "a", 100)
    fill(queue, "b", 6)
    inside = Counter({"a": 8, "b": 4})
    for _ in range(40):
        inside["a"] -= 1
        inside.update(each.tenant for each in queue.leave("a"))
    assert inside["a"] == 4
    assert queue.inside == inside.total() == 8 + inside["b"] - 4


def test_turns_go_by_weight() -> None:
    queue = FairQueue(3)
    queue.configure({"a": 2.0})
    fill(queue, "a", 300)
    fill(queue, "b", 300)
    counted = Counter(serve(queue, ["a", "a", "a", "b"], 150))
    assert abs(counted["a"] - 2 * counted["b"]) <= 4, counted


def test_requests_of_a_tenant_keep_their_order() -> None:
    queue = FairQueue(1)
    waiting = fill(queue, "a", 5)
    admitted = [each for _ in range(4) for each in queue.leave("a")]
    assert admitted == waiting


def test_one_that_gives_up_is_passed_over() -> None:
    queue = FairQueue(1)
    waiting = fill(queue, "a", 4)
    queue.withdraw(waiting[0])
    assert queue.leave("a") == [waiting[1]]
    queue.withdraw(waiting[2])
    assert queue.waiting == 0
    assert queue.leave("a") == []
    assert queue.enter("a", NOW)


def test_what_was_idle_saves_nothing_up() -> None:
    """A tenant that comes late gets its share from then on, not what it did not use before."""
    queue = FairQueue(1)
    fill(queue, "a", 200)
    for _ in range(100):
        queue.leave("a")
    fill(queue, "b", 50)
    turns = serve(queue, ["a", "b"], 20)
    assert abs(turns.count("a") - turns.count("b")) <= 1, turns


def test_what_must_not_wait_is_counted() -> None:
    queue = FairQueue(2)
    for _ in range(4):
        queue.force("a")
    assert not queue.enter("a", NOW)
    assert queue.enter("b", NOW)
    queue.wait("a")
    assert queue.leave("a") == [], "still more than the slots"


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 9)), max_size=120),
    st.fixed_dictionaries({}, optional={"a": st.floats(0.1, 10.0), "b": st.floats(0.1, 10.0)}),
)
def test_no_slot_is_idle_while_one_waits_and_none_is_lost(
    slots: int, steps: Sequence[tuple[str, bool, int]], weights: dict[str, float]
) -> None:
    queue = FairQueue(slots)
    queue.configure(weights)
    inside, waiting = Counter[str](), list[WaitingRequest]()
    for tenant, joins, number in steps:
        if joins:
            if queue.enter(tenant, NOW):
                inside[tenant] += 1
            else:
                waiting.append(queue.wait(tenant))
        elif waiting and number == 0:
            queue.withdraw(waiting.pop())
        elif inside[tenant]:
            inside[tenant] -= 1
            for each in queue.leave(tenant):
                waiting.remove(each)
                inside[each.tenant] += 1
        assert queue.inside == inside.total()
        assert queue.waiting == len(waiting)
        assert queue.inside <= 2 * slots + 3
        if waiting:
            assert queue.inside >= slots
