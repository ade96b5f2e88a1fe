"""What an agent's page says of its replicas."""

from shoal.agent.ports import BATCHES, Batches, FrontStats
from shoal.agent.supervisor import Snapshot
from shoal.agent.telemetry.metrics import AgentCollector
from shoal.types.assignment import Observed, Phase
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey


def observed(name: str) -> Observed:
    key = WorkloadKey("default", "reader")
    return Observed(name, key, "sha256:a", "cpu0", Phase.READY, Wall(1.0), None, "", None, None, 0, 0, None, ())


def test_a_worker_that_counts_in_other_sizes_takes_no_figure_of_the_others_with_it() -> None:
    counts = (0, 2, *(0 for _ in BATCHES[2:]), 1)
    snapshot = Snapshot(
        linked=False,
        epoch=0,
        version=None,
        devices=(),
        observed=(observed("well"), observed("broken")),
        readings=(),
        front=FrontStats(ready=False, ingress=(), in_flight=()),
        batches={"well": Batches(counts, 300), "broken": Batches((1,), 1)},
    )
    (family,) = (each for each in AgentCollector(lambda: snapshot).collect() if each.name == "shoal_agent_batch_size")
    told = [(each.labels.get("le"), each.value) for each in family.samples if each.labels["assignment"] == "well"]
    assert told[:2] == [("1", 0.0), ("2", 2.0)]
    assert ("+Inf", 3.0) in told
    assert {each.labels["assignment"] for each in family.samples} == {"well"}
