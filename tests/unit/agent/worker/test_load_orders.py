"""What a worker is asked to load, and who may share one."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.builders.agent_values import CPU, assignment, verification
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.worker.load_orders import LoadOrders, may_share
from shoal.agent.worker.pool_options import PoolOptions
from shoal.types.assignment import Comparison
from shoal.types.codes import Code, ShoalError
from shoal.types.migration import Against, Metric, Recording, Tolerance, Verification
from shoal.types.units import Bytes
from shoal.types.workload import WorkloadKey

EMULATED = replace(CPU, name="npu0", emulated=True, parallelism=2, computes_fp32_in="fp16")
ACCESS = DeviceAccess(files=("/dev/npu0",))


def load_orders(options: PoolOptions) -> LoadOrders:
    devices = {each.name: each for each in (CPU, EMULATED)}
    return LoadOrders(Path("/run/slots"), devices.get, lambda _: ACCESS, options)


def test_what_a_provider_maps_for_itself_is_beside_what_models_take() -> None:
    access = DeviceAccess(host_bytes=Bytes(1000))
    options = PoolOptions(memory_floor=100, memory_slack=2.0)
    orders = LoadOrders(Path("/run/slots"), {CPU.name: CPU}.get, lambda _: access, options)
    asked = assignment("a", memory_bytes=Bytes(10))
    order = orders.order(asked, "/models/a", "")
    assert (order.memory_bytes, order.access.host_bytes) == (120, 1000)
    assert orders.process_memory_bytes([asked]) == 1120
    assert orders.process_memory_bytes([asked] * 8) == 1000 + 8 * 120, "the process has one provider"
    assert orders.process_memory_bytes([assignment("b", memory_bytes=Bytes(0))]) == 0, "no limit stays none"
    assert orders.process_memory_bytes([]) == 0


def test_an_order_says_what_the_device_and_the_options_allow() -> None:
    orders = load_orders(PoolOptions(threads=3, queue=7, memory_floor=100, memory_slack=1.5))
    order = orders.order(assignment("a", memory_bytes=Bytes(10)), "/models/a", "/models/samples")
    assert (order.assignment, order.path, order.samples) == ("a", "/models/a", "/models/samples")
    assert (order.threads, order.queue, order.memory_bytes, order.access) == (3, 7, 115, ACCESS)
    assert (order.shared_by, order.slots, order.runners) == ("", (), max(1, CPU.parallelism))


COMPARED = Comparison((Tolerance("", Metric.COSINE, 0.99),), 8)


@pytest.mark.parametrize(
    ("verified", "is_compared"),
    [
        (None, True),
        (verification(), False),
        (verification(against=Against.REFERENCE), False),
        (verification(against=Against.NONE), True),
        (verification(against=Against.REFERENCE, recording=Recording.HERE), True),
        (verification(against=Against.REFERENCE, recording=Recording.AWAITED), True),
    ],
)
def test_answers_are_compared_at_the_load_of_what_nothing_else_compares(
    verified: Verification | None, is_compared: bool
) -> None:
    orders = load_orders(PoolOptions(memory_floor=100, memory_slack=1.5))
    asked = assignment("a", device="npu0", comparison=COMPARED, verification=verified, memory_bytes=Bytes(10))
    order = orders.order(asked, "/models/a", "")
    assert order.comparison == (COMPARED if is_compared else None)
    assert order.memory_bytes == (130 if is_compared else 115), "the processor holds it too meanwhile"
    assert orders.process_memory_bytes([asked]) == order.memory_bytes
    assert order.arithmetic == "fp16"


def test_workers_of_an_emulated_device_share_its_slots() -> None:
    order = load_orders(PoolOptions()).order(assignment("a", device="npu0", shared_worker=True), "/models/a", "")
    assert order.slots == ("/run/slots/npu0-0.lock", "/run/slots/npu0-1.lock")
    assert order.shared_by == "default"


def test_a_device_that_is_gone() -> None:
    with pytest.raises(ShoalError) as refused:
        load_orders(PoolOptions()).order(assignment("a", device="gpu0"), "/models/a", "")
    assert refused.value.code is Code.DEVICE_LOST


def test_the_memory_of_a_process_is_limited_only_while_every_assignment_is() -> None:
    orders = load_orders(PoolOptions(memory_floor=100, memory_slack=2.0))
    small, large, free = (assignment(str(n), memory_bytes=Bytes(n)) for n in (1, 10, 0))
    assert orders.process_memory_bytes([small, large]) == 102 + 120
    assert orders.process_memory_bytes([small, free]) == 0


def test_models_that_share_a_worker_may_take_what_their_provider_does_once() -> None:
    orders = load_orders(PoolOptions(memory_floor=100, memory_slack=2.0))
    asked = assignment("a", shared_worker=True, memory_bytes=Bytes(1010), provider_bytes=Bytes(1000))
    order = orders.order(asked, "/models/a", "")
    assert (order.memory_bytes, order.access.host_bytes) == (120, ACCESS.host_bytes + 2000)
    assert orders.process_memory_bytes([asked] * 3) == 3 * 120 + ACCESS.host_bytes + 2000
    all_of_it = replace(asked, provider_bytes=asked.memory_bytes)
    bare = load_orders(PoolOptions(memory_floor=0, memory_slack=2.0))
    assert bare.order(all_of_it, "/models/a", "").memory_bytes > 0, "no limit is another thing"


def test_who_may_share_a_worker() -> None:
    one = assignment("a", workload=WorkloadKey("t", "a"), shared_worker=True, memory_bytes=Bytes(10))
    options = PoolOptions(max_shared_models=2, max_shared_bytes=20)
    assert may_share(one, [one], options)
    assert not may_share(one, [], options)
    assert not may_share(one, [one, one], options)
    assert not may_share(replace(one, memory_bytes=Bytes(11)), [one], options)
    heavy = replace(one, memory_bytes=Bytes(1010), provider_bytes=Bytes(1000))
    assert may_share(heavy, [heavy], options), "the provider takes its part once"
    assert not may_share(replace(heavy, provider_bytes=Bytes(999)), [heavy], options)
    assert not may_share(replace(one, workload=WorkloadKey("u", "a")), [one], options)
    assert not may_share(replace(one, device="cpu1"), [one], options)
    alone = replace(one, shared_worker=False)
    assert not may_share(alone, [alone], options)
    assert not may_share(one, [alone], options)
    assert not may_share(alone, [one], options)
