"""Which integer inputs index what, and how long that is."""

from typing import Any

import onnx
from onnx import helper

from harness.models import engine_cases
from harness.models.synthetic import BOOL, FLOAT, INT64, digest_of, model, tensor, weight
from shoal.coordinator.core.graph import profile_of
from shoal.coordinator.core.graph.bounds import index_bounds
from shoal.types.profile import ModelProfile

IDS, Y = tensor("ids", ["n"], INT64), tensor("y", None)


def bounds(nodes: list[Any], *constants: Any) -> dict[str, int]:
    return index_bounds(model(nodes, [IDS], [Y], list(constants)).graph, ["ids"])


def test_an_index_is_below_the_rows_of_its_table_however_it_is_rearranged() -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["ids", "axes"], ["a"]),
        helper.make_node("Cast", ["a"], ["b"], to=onnx.TensorProto.INT32),
        helper.make_node("Gather", ["table", "b"], ["y"]),
    ]
    assert bounds(nodes, weight("table", (30522, 4))) == {"ids": 30522}
    axis = [helper.make_node("Gather", ["table", "ids"], ["y"], axis=-1)]
    assert bounds(axis, weight("table", (7, 3))) == {"ids": 3}


def test_one_hot_counts_too() -> None:
    counted = helper.make_tensor("counted", INT64, [1, 5], range(5))
    assert bounds([helper.make_node("Equal", ["ids", "counted"], ["y"])], counted) == {"ids": 5}
    depth = helper.make_tensor("depth", INT64, [], [12])
    assert bounds([helper.make_node("OneHot", ["ids", "depth", "on"], ["y"])], depth) == {"ids": 12}


def test_of_several_tables_the_shortest_counts() -> None:
    nodes = [
        helper.make_node("Gather", ["long", "ids"], ["a"]),
        helper.make_node("Gather", ["short", "ids"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    assert bounds(nodes, weight("long", (50, 4)), weight("short", (20, 4))) == {"ids": 20}


def test_what_is_computed_from_an_input_is_no_index_of_it() -> None:
    nodes = [helper.make_node("Mod", ["ids", "ten"], ["a"]), helper.make_node("Gather", ["table", "a"], ["y"])]
    assert bounds(nodes, weight("table", (10, 4))) == {}
    assert bounds([helper.make_node("Gather", ["made", "ids"], ["y"])]) == {}, "a table of unknown length"


def test_a_table_may_be_quantised_and_lie_outside_the_branch_that_reads_it() -> None:
    branch = helper.make_graph(
        [helper.make_node("Gather", ["rows", "ids"], ["in"])], "b", [], [tensor("in", None)]
    )  # fmt: skip
    nodes = [
        helper.make_node("DequantizeLinear", ["table", "scale"], ["rows"]),
        helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch),
    ]
    made = model(nodes, [IDS, tensor("flag", [], BOOL)], [Y], [weight("table", (99, 4)), weight("scale", ())])
    assert index_bounds(made.graph, ["ids"]) == {"ids": 99}


def test_a_real_model_of_tokens_has_its_vocabulary() -> None:
    content = engine_cases.magika().read_bytes()
    profile = profile_of(content, digest_of(content))
    assert isinstance(profile, ModelProfile)
    assert profile.below == {"bytes": 257}, "256 bytes and the padding"


def test_only_integers_have_a_bound() -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"])], [tensor("x", [4], FLOAT)], [Y])
    content = made.SerializeToString()
    profile = profile_of(content, digest_of(content))
    assert isinstance(profile, ModelProfile)
    assert profile.below == {}
