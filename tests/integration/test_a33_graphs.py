"""A33: graphs that cost more than they look. They are refused, or profiled at their real cost; none is ever run."""

from pathlib import Path

from onnx import ModelProto, helper

from harness.models.push import push, push_refusal
from harness.models.synthetic import BOOL, INT64, graph, ints, length_delimited_field, model, tensor
from shoal.coordinator.blobs.inspect import InspectionLimits
from shoal.types.codes import Code
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes, Seconds

TIGHT = InspectionLimits(memory_bytes=Bytes(512 * 2**20), cpu_s=Seconds(20), deadline_s=Seconds(40))


async def test_nested_subgraphs(tmp_path: Path) -> None:
    inner = graph([helper.make_node("Identity", ["x"], ["r17"])], [], [tensor("r17", [1])])
    for level in reversed(range(17)):
        node = helper.make_node("If", ["q"], [f"r{level}"], then_branch=inner, else_branch=graph(
            [helper.make_node("Identity", ["x"], [f"e{level}"])], [], [tensor(f"e{level}", [1])]))  # fmt: skip
        inner = graph([node], [], [tensor(f"r{level}", [1])])
    made = model(list(inner.node), [tensor("x", [1]), tensor("q", [], BOOL)], [tensor("r0", [1])])
    refusal = await push_refusal(tmp_path, made.SerializeToString(), TIGHT)
    assert refusal.code is Code.MODEL_INVALID
    assert "nested" in refusal.found


def calling(*edges: tuple[str, str]) -> bytes:
    imports = [helper.make_opsetid("own", 1)]
    functions = [
        helper.make_function(
            "own", caller, ["a"], ["b"], [helper.make_node(called, ["a"], ["b"], domain="own")], imports
        )
        for caller, called in edges
    ]
    first = helper.make_node(edges[0][0], ["x"], ["y"], domain="own")
    made = model([first], [tensor("x", [1])], [tensor("y", [1])], domains={"own": 1}, functions=functions)
    return bytes(made.SerializeToString())


async def test_functions_in_a_ring(tmp_path: Path) -> None:
    for content in (calling(("A", "A")), calling(("A", "B"), ("B", "C"), ("C", "A"))):
        refusal = await push_refusal(tmp_path, content, TIGHT)
        assert refusal.code is Code.MODEL_INVALID
        assert "ring" in refusal.found


async def test_a_million_nodes(tmp_path: Path) -> None:
    one = helper.make_node("Relu", ["x"], ["y"]).SerializeToString()
    refusal = await push_refusal(tmp_path, length_delimited_field(7, length_delimited_field(1, one) * 1_000_000), TIGHT)
    assert refusal.code is Code.MODEL_INVALID
    assert "too many nodes" in refusal.found


async def test_a_loop_of_2_to_the_60_trips(tmp_path: Path) -> None:
    """Without stacked outputs it is data: the profile says its cost. With them it wants an exbibyte or more."""

    def looping(results: list[str]) -> bytes:
        body = graph(
            [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Relu", ["s"], ["s2"])],
            [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", [4])],
            [tensor("c2", [], BOOL), tensor("s2", [4]), *([tensor("s2", [4])] if len(results) > 1 else [])],
        )
        node = helper.make_node("Loop", ["n", "", "x"], results, body=body)
        outputs = [tensor(name, None) for name in results]
        return bytes(model([node], [tensor("x", [4])], outputs, [ints("n", 2**60)]).SerializeToString())

    profile = await push(tmp_path, looping(["y"]), TIGHT)
    assert isinstance(profile, ModelProfile)
    assert profile.flops == 2.0**62
    refusal = await push_refusal(tmp_path, looping(["y", "all"]), TIGHT)
    assert refusal.code is Code.MODEL_INVALID
    assert "holds" in refusal.found


def tebibytes() -> bytes:
    """The fewest bytes that ask for 4 TiB: a constant of 2^40 floats, named by single letters."""
    made = ModelProto(ir_version=10)
    made.opset_import.add(version=18)
    made.graph.node.add(op_type="ConstantOfShape", input=["n"], output=["y"])
    made.graph.initializer.add(name="n", data_type=INT64, dims=[1], int64_data=[2**40])
    made.graph.output.add(name="y").type.tensor_type.elem_type = 1
    return made.SerializeToString()


async def test_a_few_bytes_that_want_4_tebibytes(tmp_path: Path) -> None:
    assert len(tebibytes()) <= 66
    refusal = await push_refusal(tmp_path, tebibytes(), TIGHT)
    assert refusal.code is Code.MODEL_INVALID
    assert "4TiB" in refusal.found


async def test_work_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    """90 000 constants that follow from each other, within every limit on size: 1 s of folding is allowed."""
    nodes = [helper.make_node("Add", [f"t{i}", "one"], [f"t{i + 1}"]) for i in range(90_000)]
    made = model(
        [*nodes, helper.make_node("Add", ["x", "t90000"], ["y"])],
        [tensor("x", [1], INT64)],
        [tensor("y", [1], INT64)],
        [ints("t0", [0]), ints("one", [1])],
    )
    refusal = await push_refusal(tmp_path, made.SerializeToString(), InspectionLimits(cpu_s=Seconds(1)))
    assert refusal.code is Code.MODEL_INVALID
    assert "processor time" in refusal.found
