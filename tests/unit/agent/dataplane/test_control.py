"""What a supervisor understands of a front."""

import json

from shoal.agent.core.wakes import UnloadedReplica
from shoal.agent.dataplane import control
from shoal.agent.ports import FrontStats
from shoal.types.assignment import AgreementCounts
from shoal.types.codes import Code, Refusal
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey


def test_a_front_of_the_version_before_is_understood() -> None:
    """It serves on while its supervisor is replaced, and does not say what is counted since."""
    counts = AgreementCounts("ag-1", "east", 3, 1, Seconds(0.25), (0, 2))
    stats = FrontStats(ready=True, ingress=(), in_flight=(), agreement_counts=(counts,))
    assert control.unpack_stats(control.pack_stats(stats)) == stats
    said = json.loads(control.pack_stats(stats))
    del said["agreement_counts"][0]["latencies"]
    (told,) = control.unpack_stats(json.dumps(said).encode()).agreement_counts
    assert told == AgreementCounts("ag-1", "east", 3, 1, Seconds(0.25))


def test_a_front_hears_of_replicas_that_are_unloaded_and_says_that_it_has() -> None:
    key = WorkloadKey("acme", "reader")
    asleep = UnloadedReplica("a-1", key, Seconds(1.2), Seconds(0.9), is_waking=True)
    failed = UnloadedReplica("a-2", key, failure=Refusal(Code.MEMORY_SHORT, "1 MiB free", "2 GiB", "free memory"))
    serving = control.ServingConfig(unloaded=(asleep, failed))
    assert control.unpack(control.pack(serving)) == serving
    said = json.loads(control.pack(serving))
    del said["unloaded"]
    assert control.unpack(json.dumps(said).encode()) == control.ServingConfig(), "from an older supervisor"
    stats = FrontStats(ready=True, ingress=(), in_flight=(), unloaded=("a-1",))
    assert control.unpack_stats(control.pack_stats(stats)) == stats


def test_a_front_says_what_its_clients_ask_for_unless_it_is_of_the_version_before() -> None:
    stats = FrontStats(ready=True, ingress=(), in_flight=(), asked=(WorkloadKey("acme", "reader"),))
    assert control.unpack_stats(control.pack_stats(stats)) == stats
    said = json.loads(control.pack_stats(stats))
    del said["asked"]
    assert control.unpack_stats(json.dumps(said).encode()).asked is None
    serving = control.ServingConfig(routes_on_demand=True)
    assert control.unpack(control.pack(serving)) == serving
    said = json.loads(control.pack(serving))
    del said["routes_on_demand"]
    assert not control.unpack(json.dumps(said).encode()).routes_on_demand
