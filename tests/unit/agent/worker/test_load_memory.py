"""What ONNX Runtime takes to load and run a model, as profiles say it: copies of constants, and the arena of a run."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from harness.models.synthetic import digest_of, graph, ints, model, relu, tensor
from shoal.coordinator.core.graph import profile_of
from shoal.coordinator.core.prediction.load_law import load_needs
from shoal.types.profile import ModelProfile

_WIDTH = 1024
_BYTES = 4 * _WIDTH**2
_CODE = """
import json, sys
from pathlib import Path
import numpy as np
import onnxruntime as ort
from shoal.agent.worker.engine import session_options
from shoal.agent.worker.isolation import peak_resident_bytes, reset_peak, resident_bytes
from shoal.host.memory import return_at_once

def session(path):
    return ort.InferenceSession(Path(path).read_bytes(), session_options(1), providers=["CPUExecutionProvider"])

if sys.argv[1]:
    first = session(sys.argv[1])  # what the process holds from then on is no model's own
    first.run(None, {"x": np.zeros((1, 4), np.float32)})
reset_peak()
before = resident_bytes()
with return_at_once():
    opened = session(sys.argv[2])
found = {"load": peak_resident_bytes() - before, "runs": []}
held = resident_bytes()
feeds = {each.name: np.ones(each.shape, np.float32) for each in opened.get_inputs()}
for _ in range(4):
    reset_peak()
    opened.run(None, feeds)
    found["runs"].append(peak_resident_bytes() - held)
print(json.dumps(found))
"""


def measure(folder: Path, made: ModelProto, *, is_first: bool = False) -> dict[str, object]:
    """is_first: the process has opened no model before, as most workers."""
    small, large = folder / "small.onnx", folder / "large.onnx"
    small.write_bytes(relu().SerializeToString())
    large.write_bytes(made.SerializeToString())
    command = [sys.executable, "-c", _CODE, "" if is_first else str(small), str(large)]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=120)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def profile(made: ModelProto) -> ModelProfile:
    content = made.SerializeToString()
    found = profile_of(content, digest_of(content))
    assert isinstance(found, ModelProfile), found
    return found


def product(depth: int, *, is_node: bool) -> ModelProto:
    """A product with one matrix, inside so many nodes, as an initializer or in a Constant node."""
    values = np.random.default_rng(0).standard_normal((_WIDTH, _WIDTH), np.float32)
    weight = numpy_helper.from_array(values, "w")
    nodes = [helper.make_node("Constant", [], ["w"], value=weight)] if is_node else []
    nodes.append(helper.make_node("MatMul", ["x", "w"], ["y"]))
    constants: list[TensorProto] = [] if is_node else [weight]
    result = "y"
    for level in range(depth):
        nodes, constants, result = _inside(nodes, constants, result, level)
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    return model(nodes, [tensor("x", [1, _WIDTH])], [tensor(result, None)], [*constants, zero], opset=17)


def _inside(
    nodes: list[NodeProto], constants: list[TensorProto], result: str, level: int
) -> tuple[list[NodeProto], list[TensorProto], str]:
    """Nodes that run them if the sum of x is above zero."""
    other: GraphProto = graph([helper.make_node("Relu", ["x"], [f"e{level}"])], [], [tensor(f"e{level}", None)])
    then = graph(nodes, [], [tensor(result, None)], constants)
    outer = [
        helper.make_node("ReduceSum", ["x"], [f"s{level}"], keepdims=0),
        helper.make_node("Greater", [f"s{level}", "zero"], [f"c{level}"]),
        helper.make_node("If", [f"c{level}"], [f"o{level}"], then_branch=then, else_branch=other),
    ]
    return outer, [], f"o{level}"


@pytest.mark.parametrize(("depth", "is_node", "copies"), [(0, True, 1), (1, False, 2), (1, True, 3), (2, False, 4)])
def test_a_load_copies_constants_of_inner_graphs_and_of_nodes_once_more(
    tmp_path: Path, depth: int, is_node: bool, copies: int
) -> None:
    plain, made = product(0, is_node=False), product(depth, is_node=is_node)
    more = float(str(measure(tmp_path, made)["load"])) - float(str(measure(tmp_path, plain)["load"]))
    assert more == pytest.approx(copies * _BYTES, abs=0.35 * _BYTES)
    counted = profile(made).copied_bytes - profile(plain).copied_bytes
    assert counted == pytest.approx(copies * _BYTES, rel=0.01)


def products(depth: int, count: int = 3) -> ModelProto:
    """As many products with matrices of the main graph, inside so many nodes."""
    draw = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(draw.standard_normal((_WIDTH, _WIDTH), np.float32), f"w{n}") for n in range(count)
    ]
    nodes = [helper.make_node("MatMul", [f"h{n}" if n else "x", f"w{n}"], [f"h{n + 1}"]) for n in range(count)]
    result = f"h{count}"
    for level in range(depth):
        nodes, _, result = _inside(nodes, [], result, level)
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    return model(nodes, [tensor("x", [1, _WIDTH])], [tensor(result, None)], [*weights, zero], opset=17)


@pytest.mark.parametrize(("depth", "ordered"), [(1, 3), (2, 0)])
def test_weights_that_an_inner_graph_multiplies_by_are_all_ordered_before_one_is_freed(
    tmp_path: Path, depth: int, ordered: int
) -> None:
    plain, made = products(0), products(depth)
    alone, inside = (float(str(measure(tmp_path, each, is_first=True)["load"])) for each in (plain, made))
    more = max(0, ordered - 1) * _BYTES  # of three one is there twice anyway
    assert inside - alone == pytest.approx(more, abs=0.35 * _BYTES)
    for peak, of in ((alone, plain), (inside, made)):
        assert load_needs(profile(of)).memory_sizes.other_bytes * 3 + 8.1 * 2**20 == pytest.approx(peak, rel=0.1)
    assert profile(plain).inner_packed_bytes == 0
    assert profile(made).inner_packed_bytes == ordered * _BYTES


@pytest.mark.parametrize(("depth", "copies"), [(0, 1), (1, 2)])
def test_what_is_computed_of_weights_is_there_beside_them_in_each_graph_that_reads_it(
    tmp_path: Path, depth: int, copies: int
) -> None:
    """Transposed matrices of the main graph. Both branches of an If transpose them for themselves."""

    def make_model(*, is_folded: bool) -> ModelProto:
        draw = np.random.default_rng(0)
        weights = [numpy_helper.from_array(draw.standard_normal((_WIDTH, _WIDTH), np.float32), f"w{n}") for n in (0, 1)]

        def nodes(result: str) -> list[NodeProto]:
            first, second = (f"{result}0", f"{result}1") if is_folded else ("w0", "w1")
            folded = [helper.make_node("Transpose", [f"w{n}"], [f"{result}{n}"]) for n in (0, 1)] if is_folded else []
            products = helper.make_node("MatMul", ["x", first], ["h" + result])
            return [*folded, products, helper.make_node("MatMul", ["h" + result, second], [result])]

        if depth == 0:
            return model(nodes("y"), [tensor("x", [1, _WIDTH])], [tensor("y", None)], weights, opset=17)
        then, other = (graph(nodes(name), [], [tensor(name, None)]) for name in ("t", "e"))
        outer = [
            helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
            helper.make_node("Greater", ["s", "zero"], ["c"]),
            helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other),
        ]
        zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
        return model(outer, [tensor("x", [1, _WIDTH])], [tensor("y", None)], [*weights, zero], opset=17)

    plain, folded = make_model(is_folded=False), make_model(is_folded=True)
    assert profile(plain).folded_bytes == 0
    assert profile(folded).folded_bytes == 2 * copies * _BYTES
    peak = float(str(measure(tmp_path, folded, is_first=True)["load"]))
    assert load_needs(profile(folded)).memory_sizes.other_bytes * 3 + 8.1 * 2**20 == pytest.approx(peak, rel=0.1)


def test_what_a_node_with_a_graph_inside_makes_is_not_computed_as_it_loads(tmp_path: Path) -> None:
    """A Loop with a constant count, condition and state, whose body reads an input of the model: a load makes none of
    its 16 MB."""
    draw, state = np.random.default_rng(0), [tensor("s2", [1, _WIDTH]), tensor("o", [1, _WIDTH])]
    body = graph(
        [
            helper.make_node("Add", ["s", "x"], ["s2"]),
            helper.make_node("Identity", ["c"], ["c2"]),
            helper.make_node("Identity", ["s2"], ["o"]),
        ],
        [tensor("i", [], TensorProto.INT64), tensor("c", [], TensorProto.BOOL), tensor("s", [1, _WIDTH])],
        [tensor("c2", [], TensorProto.BOOL), *state],
    )
    constants = [
        numpy_helper.from_array(np.array(4000, np.int64), "count"),
        numpy_helper.from_array(np.array(True), "true"),
        numpy_helper.from_array(np.zeros((1, _WIDTH), np.float32), "zero"),
        numpy_helper.from_array(draw.standard_normal((_WIDTH, _WIDTH), np.float32), "w"),
    ]
    nodes = [
        helper.make_node("Loop", ["count", "true", "zero"], ["last", "all"], body=body),
        helper.make_node("Relu", ["all"], ["r"]),
        helper.make_node("ReduceMean", ["r"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["last", "w"], ["y"]),
    ]
    outputs = [tensor("y", None), tensor("mean", None)]
    made = model(nodes, [tensor("x", [1, _WIDTH])], outputs, constants, opset=17)
    found = profile(made)
    assert found.folded_bytes == 0
    peak = float(str(measure(tmp_path, made, is_first=True)["load"]))
    assert load_needs(found).memory_sizes.other_bytes * 3 + 8.1 * 2**20 == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("operator", ["RandomNormalLike", "RandomUniformLike", "Bernoulli"])
def test_what_is_drawn_is_not_computed_as_it_loads(operator: str) -> None:
    weight = numpy_helper.from_array(np.zeros((_WIDTH, _WIDTH), np.float32), "w")
    nodes = [helper.make_node(operator, ["w"], ["drawn"]), helper.make_node("Add", ["x", "drawn"], ["y"])]
    made = model(nodes, [tensor("x", [_WIDTH, _WIDTH])], [tensor("y", None)], [weight], opset=17)
    assert profile(made).folded_bytes == 0


def test_a_run_takes_what_the_profile_says_and_the_next_ones_no_more(tmp_path: Path) -> None:
    """Tensors of many sizes. A memory pattern would take one more block of most of them at the second run."""
    nodes, shapes, before = list[NodeProto](), list[TensorProto](), "x"
    for index, rows in enumerate((256, 384, 640, 896, 1152, 1536)):
        shapes.append(ints(f"rows{index}", [rows, 512]))
        nodes += [
            helper.make_node("ReduceMean", [before], [f"m{index}"], keepdims=1),
            helper.make_node("Expand", ["seed", f"rows{index}"], [f"e{index}"]),
            helper.make_node("Add", [f"e{index}", f"m{index}"], [f"a{index}"]),
            helper.make_node("Softmax", [f"a{index}"], [f"s{index}"]),
            helper.make_node("Concat", [f"a{index}", f"s{index}"], [f"c{index}"], axis=0),
        ]
        before = f"c{index}"
    nodes.append(helper.make_node("ReduceSum", [before], ["y"]))
    made = model(nodes, [tensor("x", [1, 512]), tensor("seed", [1, 512])], [tensor("y", None)], shapes)
    runs = measure(tmp_path, made)["runs"]
    assert isinstance(runs, list)
    found = profile(made)
    assert found.confident
    assert runs[0] == pytest.approx(found.run_bytes, rel=0.25)
    assert max(runs) < 1.05 * runs[0]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere convolutions have no layout of their own")
def test_a_run_takes_what_the_profile_says_where_convolutions_have_a_layout_of_their_own(tmp_path: Path) -> None:
    """Each convolution needs a copy of its input with the channels in blocks, and what follows a copy back."""
    draw = np.random.default_rng(0)
    nodes, weights, before, channels = list[NodeProto](), list[TensorProto](), "x", 16
    for index in range(6):
        weights.append(numpy_helper.from_array(draw.standard_normal((16, channels, 3, 3), np.float32), f"w{index}"))
        nodes += [
            helper.make_node("Softplus", [before], [f"s{index}"]),
            helper.make_node("Conv", [f"s{index}", f"w{index}"], [f"c{index}"], pads=[1] * 4),
            helper.make_node("Softplus", [f"c{index}"], [f"a{index}"]),
            helper.make_node("Concat", [f"s{index}", f"a{index}"], [f"j{index}"], axis=1),
        ]
        before, channels = f"j{index}", channels + 16
    nodes.append(helper.make_node("ReduceSum", [before], ["y"]))
    made = model(nodes, [tensor("x", [4, 16, 64, 64])], [tensor("y", None)], weights)
    runs = measure(tmp_path, made)["runs"]
    assert isinstance(runs, list)
    found = profile(made)
    assert found.confident
    assert runs[0] == pytest.approx(found.run_bytes, rel=0.1)
    assert found.run_bytes > 1.3 * found.activation_bytes
