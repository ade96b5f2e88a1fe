"""Memory is looked at once more before a load."""

from harness.builders.agent_values import assignment, at, reading
from shoal.agent.core.admission import admit
from shoal.agent.core.assignment import states
from shoal.types.codes import Code, Refusal
from shoal.types.units import Bytes

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
