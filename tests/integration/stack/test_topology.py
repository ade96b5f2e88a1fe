"""What the command line says of links, on a region with an emulated card whose maker publishes its own."""

import json
from collections.abc import Iterator

import onnx
import pytest
from onnx import numpy_helper

from harness.cluster.stack import DevStack, documents, on_nodes, policy, region, workload
from harness.models.engine_cases import dense

NAME = "linked"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    with region(tmp_path_factory.mktemp("linked"), 2, fleet=(("plain-cpu", ""), ("cloud-gpu", "nvidia-l4"))) as found:
        found.push(dense(), NAME)
        yield found


def test_a_link_is_shown_with_its_source_and_takes_a_part_of_a_move(stack: DevStack) -> None:
    listed = stack.shoal("get", "devices", "-o", "wide")
    (card,) = [line for line in listed.stdout.splitlines() if "cloud-gpu/nvidia-l4" in line]
    assert "PCIe 4.0 x16 (31.5GB/s, published: nvidia.com" in card
    described = json.loads(stack.shoal("describe", "node", "cloud-gpu", "-o", "json").stdout)
    (found,) = described if isinstance(described, list) else [described]
    (device,) = [each for each in found["node"]["devices"] if each["name"] == "nvidia-l4"]
    (link,) = device["links"]
    assert (link["name"], link["source"].partition(":")[0]) == ("PCIe 4.0 x16", "published")
    assert 31e9 < link["bytes_per_s"] < 32e9
    assert device["numa"] is None, "nobody says"

    stack.apply(documents(policy(NAME, on_nodes(["plain-cpu"])), workload(NAME, NAME, NAME)))
    stack.wait_serving(NAME)
    stack.apply(policy(NAME, on_nodes(["plain-cpu", "cloud-gpu"])))
    asked = stack.shoal("can-move", NAME, "--to", "cloud-gpu/nvidia-l4")
    assert asked.returncode == 0, asked.stderr
    assert "of it at least" in asked.stdout, asked.stdout
    assert "over PCIe 4.0 x16 (31.5GB/s, published: nvidia.com" in asked.stdout
    (one,) = json.loads(stack.shoal("can-move", NAME, "--to", "cloud-gpu/nvidia-l4", "-o", "json").stdout)["estimates"]
    weights = sum(numpy_helper.to_array(each).nbytes for each in onnx.load_from_string(dense()).graph.initializer)
    assert one["transfer_s"] == pytest.approx(weights / link["bytes_per_s"])
    here = stack.shoal("can-move", NAME, "--to", "plain-cpu")
    assert "of it at least" not in here.stdout, "the processor works in the host's memory"
