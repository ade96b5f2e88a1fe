"""Memory is looked at once more before a load."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from harness.builders.agent_values import assignment, at, measurement, reading
from shoal.agent.core.admission import admit, is_shared_alike
from shoal.agent.core.assignment import states
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal
from shoal.types.units import Bytes
from shoal.types.workload import WorkloadKey

ASKED = assignment(memory_bytes=Bytes(1000))
OWN = ("cpu0",)


def loading(name: str, device: str, memory: int) -> states.State:
    asked = assignment(name, device=device, memory_bytes=Bytes(memory))
    return states.Loading(asked, states.AssignmentRecord(), at(0), at(1))


def test_admitted_where_it_fits_by_live_free_memory() -> None:
    assert admit(ASKED, reading(1000), None, (), OWN) is None


def test_refused_with_what_was_found_and_asked() -> None:
    refusal = admit(ASKED, reading(999), None, (), OWN)
    assert refusal is not None
    assert refusal.code is Code.MEMORY_SHORT
    assert "999B free on cpu0" in refusal.found
    assert refusal.remedy


def test_the_process_of_a_replica_counts_beside_its_model() -> None:
    assert admit(ASKED, reading(1300), None, (), OWN, 300) is None
    refusal = admit(ASKED, reading(1299), None, (), OWN, 300)
    assert refusal is not None
    assert refusal.asked == "1.27KiB"


def test_what_others_load_there_now_is_set_aside_and_itself_is_not() -> None:
    others = (loading("a-2", "cpu0", 500), loading("a-3", "gpu0", 10**9), loading(ASKED.id, "cpu0", 1000))
    assert admit(ASKED, reading(1500), None, others, OWN) is None
    refusal = admit(ASKED, reading(1499), None, others, OWN)
    assert refusal is not None
    assert refusal.code is Code.MEMORY_SHORT


def test_what_loads_on_a_device_in_the_same_memory_is_set_aside_too() -> None:
    others = (loading("a-2", "npu0", 500),)
    assert admit(ASKED, reading(1499), None, others, OWN) is None
    assert admit(ASKED, reading(1500), None, others, ("cpu0", "npu0")) is None
    assert admit(ASKED, reading(1499), None, others, ("cpu0", "npu0")) is not None


def test_a_device_that_does_not_answer_takes_nothing() -> None:
    refusal = admit(ASKED, None, Refusal(Code.DEVICE_LOST, "it fell off the bus"), (), OWN)
    assert refusal is not None
    assert refusal.code is Code.DEVICE_LOST
    assert (refusal.found, refusal.remedy) == ("cpu0 does not answer: it fell off the bus", "check its driver")


def test_what_does_not_answer_is_said_once() -> None:
    said = "cpu0 does not answer, as its file says"
    refusal = admit(ASKED, None, Refusal(Code.DEVICE_LOST, said), (), OWN)
    assert refusal is not None
    assert refusal.found == said


def test_a_device_that_answers_again_waits_for_its_measurement() -> None:
    """Its driver is as it should be: nobody is told to check it."""
    refusal = admit(ASKED, None, None, (), OWN)
    assert refusal is not None
    assert refusal.code is Code.DEVICE_LOST
    assert "not measured again yet" in refusal.found
    assert "driver" not in str(refusal)


def test_a_device_whose_driver_does_not_answer_is_not_lost() -> None:
    refusal = admit(ASKED, None, Refusal(Code.DEVICE_UNREACHABLE, "its driver hangs"), (), OWN)
    assert refusal is not None
    assert refusal.code is Code.DEVICE_UNREACHABLE
    assert "its driver hangs" in refusal.found
    lost = admit(ASKED, None, Refusal(Code.RUNTIME_FAILED, "no answer"), (), OWN)
    assert lost is not None
    assert lost.code is Code.DEVICE_LOST


def for_sharing(name: str, memory: int = 1334, **changes: Any) -> Assignment:
    """In a worker whose provider takes 800."""
    asked = assignment(name, memory_bytes=Bytes(memory), provider_bytes=Bytes(800), shared_worker=True)
    return replace(asked, **changes)


def loads(*assignments: Assignment) -> list[states.State]:
    return [states.Loading(each, states.AssignmentRecord(), at(0), at(1)) for each in assignments]


def test_a_provider_counts_once_for_those_that_load_into_one_worker() -> None:
    """As a restarted node loads all that the coordinator had admitted one after the other."""
    begun = loads(*(for_sharing(f"s-{n}") for n in range(4)))
    needed = 800 + 5 * 534
    assert admit(for_sharing("s-4"), reading(needed), None, begun, OWN) is None
    assert admit(for_sharing("s-4"), reading(needed - 1), None, begun, OWN) is not None
    for other in (
        for_sharing("s-4", shared_worker=False, provider_bytes=Bytes(0)),
        for_sharing("s-4", workload=WorkloadKey("other", "ocr")),
    ):
        assert admit(other, reading(needed + 799), None, begun, OWN) is not None, "it gets a worker of its own"
        assert admit(other, reading(needed + 800), None, begun, OWN) is None
    elsewhere = loads(for_sharing("s-4", device="npu0"))
    assert admit(for_sharing("s-5"), reading(2 * 1334 - 1), None, elsewhere, ("cpu0", "npu0")) is not None


def test_a_provider_that_is_loaded_is_in_the_reading_already() -> None:
    model = states.LoadedModel(measurement(), (), ())
    first = states.Ready(for_sharing("s-0"), states.AssignmentRecord(), at(0), model)
    assert admit(for_sharing("s-2"), reading(2 * 534), None, [first, *loads(for_sharing("s-1"))], OWN) is None
    assert admit(for_sharing("s-2"), reading(2 * 534 - 1), None, [first, *loads(for_sharing("s-1"))], OWN) is not None
    asleep = states.ScaledToZero(for_sharing("s-0"), states.AssignmentRecord(), at(0), model)
    assert admit(for_sharing("s-2"), reading(1333), None, [asleep], OWN) is not None, "its worker is gone"
    assert admit(for_sharing("s-2"), reading(1334), None, [asleep], OWN) is None


def test_a_provider_counts_again_where_a_worker_has_no_room() -> None:
    def may_share(new: Assignment, held: Collection[Assignment]) -> bool:
        return is_shared_alike(new, held) and len(held) < 2

    begun = loads(for_sharing("s-0"), for_sharing("s-1"))
    assert admit(for_sharing("s-2"), reading(2 * 800 + 3 * 534), None, begun, OWN, 0, may_share) is None
    assert admit(for_sharing("s-2"), reading(2 * 800 + 3 * 534 - 1), None, begun, OWN, 0, may_share) is not None
