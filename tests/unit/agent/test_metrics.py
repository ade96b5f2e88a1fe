"""What an agent's page says of its replicas."""

from dataclasses import replace

from shoal.agent.metrics import DEVICE_THROTTLED, SUPERVISOR
from shoal.agent.ports import BATCHES, Batches, FrontStats
from shoal.agent.supervisor import NodeSnapshot
from shoal.agent.telemetry.page import readings
from shoal.host.metrics import MetricsCollector
from shoal.types.assignment import Observed, Phase, Served
from shoal.types.device import Device, DeviceKind, EnergySource, Reading
from shoal.types.units import Bytes, Joules, Seconds, Wall, Watts
from shoal.types.workload import WorkloadKey


def make_observed(name: str) -> Observed:
    key = WorkloadKey("default", "reader")
    return Observed(name, key, "sha256:a", "cpu0", Phase.READY, Wall(1.0), None, "", None, None, 0, 0, None, ())


def test_a_worker_that_counts_in_other_sizes_takes_no_figure_of_the_others_with_it() -> None:
    counts = (0, 2, *(0 for _ in BATCHES[2:]), 1)
    snapshot = NodeSnapshot(
        is_linked=False,
        epoch=0,
        version=None,
        devices=(),
        observations=(make_observed("well"), make_observed("broken")),
        readings=(),
        front=FrontStats(ready=False, ingress=(), in_flight=()),
        batches={"well": Batches(counts, 300), "broken": Batches((1,), 1)},
    )
    page = MetricsCollector(SUPERVISOR, lambda: readings(snapshot))
    (family,) = (each for each in page.collect() if each.name == "shoal_agent_batch_size")
    told = [(each.labels.get("le"), each.value) for each in family.samples if each.labels["assignment"] == "well"]
    assert told[:2] == [("1", 0.0), ("2", 2.0)]
    assert ("+Inf", 3.0) in told
    assert {each.labels["assignment"] for each in family.samples} == {"well"}


def test_every_series_of_a_replica_says_whether_its_device_is_emulated() -> None:
    npu = Device("npu0", DeviceKind.NPU, "v", "m", "d", "1", "1", "CPUExecutionProvider", Bytes(1), emulated=True)
    served = Served("gateway", 3, 0, Seconds(0.1), Seconds(0.2), Joules(0.5), EnergySource.PROFILE)
    one = replace(make_observed("a-1"), device="npu0", served=(served,))
    snapshot = NodeSnapshot(
        is_linked=False,
        epoch=0,
        version=None,
        devices=(npu,),
        observations=(one, make_observed("a-2")),
        readings=(),
        front=FrontStats(ready=False, ingress=(), in_flight=()),
        batches={"a-1": Batches((1, *(0 for _ in BATCHES)), 1)},
    )
    page = MetricsCollector(SUPERVISOR, lambda: readings(snapshot))
    samples = [sample for family in page.collect() for sample in family.samples]
    emulated = {sample.labels["emulated"] for sample in samples if sample.labels.get("assignment") == "a-1"}
    names = {sample.name for sample in samples if sample.labels.get("assignment") == "a-1"}
    assert emulated == {"true"}
    assert {"shoal_agent_request_energy_joules_total", "shoal_agent_latency_seconds", "shoal_agent_in_flight"} <= names


def test_a_device_that_slows_itself_down_says_so() -> None:
    calm = Reading("cpu0", Bytes(1), 0.5, 60.0, Watts(9.0), 1.0, Wall(1.0))
    snapshot = NodeSnapshot(
        is_linked=False,
        epoch=0,
        version=None,
        devices=(),
        observations=(),
        readings=(calm, replace(calm, device="gpu0", throttled=True)),
        front=FrontStats(ready=False, ingress=(), in_flight=()),
        batches={},
    )
    assert readings(snapshot)[DEVICE_THROTTLED] == {("cpu0", ""): 0.0, ("gpu0", ""): 1.0}
