"""A region without IPv4: a node joins, is linked and serves over `[::1]` alone."""

from pathlib import Path

import numpy as np

from harness.cluster.agents import AgentProcess, api
from harness.cluster.coordinator import REGION, CoordinatorServer
from harness.cluster.stack import workload
from harness.models.synthetic import relu
from harness.wait import wait_until
from shoal.client import Context, InferenceClient
from shoal.v1 import operator_pb2


def test_a_node_joins_and_serves_over_ipv6(tmp_path: Path) -> None:
    anywhere = "[::1]:0"
    coordinator = CoordinatorServer(tmp_path, link=anywhere, enrol=anywhere, metrics=anywhere)
    coordinator.start()
    node = AgentProcess(coordinator, tmp_path / "edge-1", "edge-1", "node", host="::1")
    try:
        joined = node.join()
        assert joined.returncode == 0, joined.stderr
        node.start()
        (tmp_path / "relu.onnx").write_bytes(relu().SerializeToString())
        with api(coordinator) as operator:
            operator.push(tmp_path / "relu.onnx", "relu")
            document = operator_pb2.Document(name="w.yaml", text=workload("reader", "relu"))
            assert not operator.apply([document]).problems
            view = wait_until(
                lambda: next(each for each in operator.get("nodes").nodes if each.front_ready), 60.0, "a node"
            )
        addresses = (view.node.data_address, view.node.metrics_address)
        assert all(each.startswith("[::1]:") for each in addresses), addresses
        context = Context("v6", REGION, coordinator.link, str(coordinator.ready["operator_dir"]), addresses[0])
        with InferenceClient(context) as client:
            x = np.array([[-1, 2, -3, 4]], np.float32)
            answer = wait_until(lambda: client.infer("reader", {"x": x}), 60.0, "an answer")
        assert np.array_equal(answer.outputs["y"], np.maximum(x, 0))
    finally:
        node.end()
        coordinator.end()
