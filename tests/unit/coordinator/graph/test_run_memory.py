"""Which tensors of a run share a block, in which layout they are, and in which order kernels run."""

from itertools import pairwise
from typing import Any

import pytest
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from harness.models.synthetic import tensor
from shoal.coordinator.core.graph.blocked_layout import OpenAxes, Step, open_axes_of, tasks_of
from shoal.coordinator.core.graph.run_memory import RunBytes, Task, Tensor, execution_order, run_bytes
from shoal.coordinator.core.graph.values import Value
from shoal.types.profile import RUN_BATCHES

KIB = 2**10
Shapes = dict[str, tuple[int, ...]]


def node(operator: str, *inputs: str, to: str, **attributes: Any) -> NodeProto:
    return helper.make_node(operator, list(inputs), [to], **attributes)


def value(shape: tuple[int, ...], *, constant: bool = False) -> Value:
    return Value(TensorProto.FLOAT, shape, constant=constant)


def alike(names: str, shape: tuple[int, ...], **others: tuple[int, ...]) -> Shapes:
    """Tensors of one letter each that have this shape, and others."""
    return dict.fromkeys(names, shape) | others


def lower(
    nodes: list[NodeProto], shapes: Shapes, *results: str, absorbed: tuple[int, ...] = (), x: OpenAxes = OpenAxes.NAMED
) -> list[Task]:
    """Tensors named w.. are weights; those without a shape have 100 KiB."""

    def value_of(name: str) -> Value:
        return value(shapes.get(name, (25 * KIB,)), constant=name.startswith("w"))

    steps = [
        Step(each, [*map(value_of, each.input)], [*map(value_of, each.output)], 0, index in absorbed)
        for index, each in enumerate(nodes)
    ]
    return tasks_of(steps, results, {"x": x})


def bytes_of(
    nodes: list[NodeProto], shapes: Shapes, *results: str, absorbed: tuple[int, ...] = (), x: OpenAxes = OpenAxes.NAMED
) -> int:
    """Results count two or three times, since those of one run are held in the next; the third may find the place of
    the first's in use."""
    return run_bytes(lower(nodes, shapes, *results, absorbed=absorbed, x=x), map(Tensor, results)).one_bytes


def layouts(tasks: list[Task]) -> list[str]:
    """What each task makes, in the order in which they run; # marks channels in blocks."""
    made = [task.made[0].tensor for task in tasks]
    return [f"{each.name}{'#' * each.is_blocked}" for each in made]


def test_elementwise_work_is_done_in_place_unless_its_input_is_read_later() -> None:
    small: Shapes = {"y": (1,)}
    chain = [node("Conv", "x", to="a"), node("Relu", "a", to="b"), node("Sqrt", "b", to="c"), node("Erf", "c", to="y")]
    assert bytes_of(chain, small, "y") == 100 * KIB + 3 * 256
    not_in_place = [node("Conv", "x", to="a"), node("Erf", "a", to="b"), node("Erf", "b", to="y")]
    assert bytes_of(not_in_place, small, "y") == 200 * KIB + 2 * 256
    later = [*chain[:3], node("Concat", "b", "c", to="y")]
    assert bytes_of(later, small, "y") == 200 * KIB + 3 * 256
    other_size = [node("Conv", "x", to="a"), node("Add", "a", "w", to="b"), node("Erf", "b", to="y")]
    assert bytes_of(other_size, small | {"b": (100 * KIB,)}, "y") == 500 * KIB + 2 * 256
    assert bytes_of(chain[:3], {}, "c") == 300 * KIB, "a result has a block of its own in each run"


def test_what_a_kernel_absorbs_and_a_view_have_no_block_of_their_own() -> None:
    nodes = [node("MatMul", "x", to="a"), node("Softmax", "a", to="b"), node("Reshape", "b", to="c")]
    nodes.append(node("Erf", "c", to="y"))
    assert bytes_of(nodes, {"y": (1,)}, "y") == 200 * KIB + 2 * 256
    assert bytes_of(nodes, {"y": (1,)}, "y", absorbed=(1,)) == 100 * KIB + 3 * 256


def test_a_view_keeps_its_inputs_block() -> None:
    nodes = [node("MatMul", "x", to="a"), node("Reshape", "a", to="b"), node("Erf", "x", to="c")]
    nodes += [node("Concat", "b", "c", to="y")]
    assert bytes_of(nodes, {"y": (50 * KIB,)}, "y") == 600 * KIB


def test_a_view_of_an_input_has_no_block_unless_it_is_a_result() -> None:
    """As of a weight: the caller holds both. A result is copied."""
    nodes = [node("Reshape", "x", to="a"), node("Identity", "a", to="b"), node("Erf", "b", to="y")]
    assert bytes_of(nodes, {}, "y") == 200 * KIB
    assert bytes_of(nodes, {}, "b", "y") == 400 * KIB
    # What the caller holds is not written to.
    relu = node("Relu", "b", to="r")
    assert bytes_of([*nodes, relu, node("Add", "r", "y", to="z")], {}, "z") == 400 * KIB


def test_an_output_that_nothing_reads_takes_nothing_and_results_stay() -> None:
    nodes = [helper.make_node("Split", ["x"], ["a", "unread"]), node("Erf", "a", to="b"), node("Erf", "b", to="y")]
    assert bytes_of(nodes, {}, "y") == 300 * KIB
    assert bytes_of(nodes, {}, "a", "y") == 500 * KIB


def test_a_block_in_which_nothing_is_left_is_kept_for_the_next_of_its_shape() -> None:
    """The runtime plans that; meanwhile nothing else takes the block. For another shape it does not, whatever its
    size."""
    nodes = [node("Erf", before, to=after) for before, after in pairwise(["x", "a", "b", "c", "d", "y"])]
    shapes: Shapes = {"a": (50 * KIB,), "b": (10 * KIB,), "c": (25 * KIB,), "d": (50 * KIB,), "y": (50 * KIB,)}
    assert bytes_of(nodes, shapes, "y") == 600 * KIB, "a, then d; b; c, then a part of y; y again"
    assert bytes_of(nodes, shapes | {"d": (2, 25 * KIB)}, "y") == 1000 * KIB, "c is in what was a's, so d and y are not"


def test_without_names_of_axes_the_runtime_neither_works_in_place_nor_plans_blocks() -> None:
    shapes = alike("xab", (1, 8, 40, 40), y=(1,))
    nodes = [node("MaxPool", "x", to="a"), node("Neg", "a", to="b"), node("Erf", "b", to="y")]

    def is_known(x: OpenAxes) -> set[bool]:
        return {made.shape is not None for task in lower(nodes, shapes, "y", x=x) for made in task.made}

    assert is_known(OpenAxes.NAMED) == {True}
    assert is_known(OpenAxes.NAMED_INNER) == {False}, "a window makes lengths without names"
    assert bytes_of(nodes, shapes, "y") == 50 * KIB + 3 * 256
    assert bytes_of(nodes, shapes, "y", x=OpenAxes.NAMED_INNER) == 100 * KIB + 2 * 256


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ([1, 3, 8, 8], OpenAxes.NAMED),
        (["n", 3, 8, 8], OpenAxes.NAMED),
        (["n", 3, "h", 8], OpenAxes.NAMED_INNER),
        ([None, 3, 8, 8], OpenAxes.UNNAMED),
    ],
)
def test_open_axes_are_those_without_a_length(shape: list[Any], found: OpenAxes) -> None:
    info: ValueInfoProto = tensor("x", shape)
    assert open_axes_of(info) is found


def test_convolutions_work_on_blocks_and_what_does_not_gets_a_copy() -> None:
    shapes = alike("abcy", (1, 16, 8, 8), x=(1, 3, 8, 8), w=(16, 3, 3, 3), w2=(16, 16, 3, 3))
    nodes = [node("Conv", "x", "w", to="a"), node("Conv", "a", "w2", to="b"), node("Relu", "b", to="c")]
    tasks = lower([*nodes, node("Softmax", "c", to="y")], shapes, "y", absorbed=(2,))
    assert layouts(execution_order(tasks, [])) == ["a#", "c#", "c", "y"]
    assert layouts([task for task in tasks if task.is_copy]) == ["c"]


def test_of_copies_that_the_runtime_lists_by_chance_the_order_that_takes_more_counts() -> None:
    """A dense block: both convolutions' outputs are copied out of blocks for what follows."""
    shapes = alike("abd", (1, 20, 8, 8), x=(1, 3, 8, 8), c=(1, 40, 8, 8), e=(1, 60, 8, 8), y=(1, 60, 8, 8))
    shapes |= {"w1": (20, 3, 3, 3), "w2": (20, 20, 3, 3), "w3": (20, 40, 1, 1)}
    nodes = [node("Conv", "x", "w1", to="a"), node("Conv", "a", "w2", to="b"), node("Concat", "a", "b", to="c", axis=1)]
    nodes += [node("Conv", "c", "w3", to="d"), node("Concat", "c", "d", to="e", axis=1), node("Softmax", "e", to="y")]
    tasks, result = lower(nodes, shapes, "y"), [Tensor("y")]
    is_out = [task.is_copy and not task.made[0].tensor.is_blocked for task in tasks]
    places = [task.place for task, out in zip(tasks, is_out, strict=True) if out]
    other = [task._replace(place=places.pop()) if out else task for task, out in zip(tasks, is_out, strict=True)]
    assert layouts(execution_order(tasks, result))[:4] == ["a#", "b#", "b", "a"]
    assert layouts(execution_order(other, result))[:4] == ["a#", "a", "b#", "b"]
    assert run_bytes(tasks, result) == run_bytes(other, result)
    assert run_bytes(tasks, result).one_bytes == 61 * KIB, "58 in the first order"


def test_a_convolution_copies_what_stands_in_the_usual_layout_once() -> None:
    shapes = alike("abcxy", (1, 16, 8, 8), w=(16, 16, 3, 3))
    nodes = [node("Softmax", "x", to="a"), node("Conv", "a", "w", to="b"), node("Conv", "a", "w", to="c")]
    nodes += [node("Add", "b", "c", to="y")]
    tasks = lower(nodes, shapes, "y", absorbed=(3,))
    assert sorted(layouts(tasks)) == ["a", "a#", "c#", "y", "y#"], "the first convolution adds the second's output"
    adds = next(task for task in tasks if task.made[0].tensor == Tensor("y", True))
    assert set(adds.reads) == {Tensor("a", True), Tensor("c", True)}
    assert adds.reusable == (Tensor("c", True),), "into whose block it writes"


@pytest.mark.parametrize(
    ("weights", "groups", "is_blocked"),
    [
        ((16, 3, 3, 3), 1, True),
        ((6, 16, 1, 1), 1, True),
        ((16, 20, 1, 1), 1, True),
        ((16, 18, 1, 1), 1, False),
        ((32, 1, 3, 3), 32, True),
        ((24, 1, 3, 3), 24, False),
        ((32, 16, 3, 3), 2, True),
        ((32, 8, 3, 3), 4, False),
        ((32, 8, 3, 3), 0, False),
    ],
)
def test_which_convolutions_work_on_blocks(weights: tuple[int, ...], groups: int, is_blocked: bool) -> None:
    shapes: Shapes = {"x": (1, weights[1] * max(1, groups), 8, 8), "w": weights, "y": (1, weights[0], 8, 8)}
    tasks = lower([node("Conv", "x", "w", to="y", group=groups)], shapes, "y")
    assert (Tensor("y", True) in {task.made[0].tensor for task in tasks}) == is_blocked
    padded = {task.made[0].bytes for task in tasks if task.made[0].tensor == Tensor("y", True)}
    assert padded <= {4 * 64 * (-(-weights[0] // 16) * 16)}


def test_of_what_a_kernel_waits_for_the_last_in_the_list_runs_first() -> None:
    nodes = [node("Erf", "x", to="a"), node("Erf", "x", to="b"), node("Concat", "a", "b", to="y", axis=0)]
    assert layouts(execution_order(lower(nodes, {}, "y"), [])) == ["b", "a", "y"]


def test_a_tensor_with_a_peculiar_name_is_a_tensor_like_any_other() -> None:
    shapes: Shapes = {"x": (1, 16, 8, 8), "w": (16, 16, 1, 1), "a": (1, 16, 8, 8), "a\0": (1, 16, 8, 8), "": (1,)}
    nodes = [node("Conv", "x", "w", to="a"), node("Erf", "x", to="a\0"), node("Add", "a", "a\0", to="y")]
    assert bytes_of(nodes, shapes, "y") > 0


def test_the_answer_of_one_run_keeps_the_next_from_its_block() -> None:
    """The answer of the first run is in what was a's block: the second has a behind it, and b in another region. The
    third has a at the start again, but the second's answer is where its own would fit."""
    nodes = [node("Erf", "x", to="a"), node("Erf", "a", to="b"), node("Erf", "b", to="y")]
    shapes: Shapes = {"a": (100 * KIB,), "b": (10 * KIB,), "y": (60 * KIB,)}
    first, second, third = 400 + 40, 400 - 40 + 40, 120
    assert bytes_of(nodes, shapes, "y") == (first + second + third) * KIB
    assert bytes_of(nodes[:2], {"a": (100 * KIB,), "b": (1,)}, "b") == 400 * KIB + 3 * 256


def test_each_further_request_takes_what_a_batch_takes_more_than_one() -> None:
    """Regions of 1, 2, 4 MiB: of 400 KiB four blocks are used, two of answers. Of three requests, 1.2 MiB each, a
    region that holds one block has no room for a second, so that five are."""
    nodes = [node("Erf", "x", to="a"), node("Erf", "x", to="b"), node("Concat", "a", "b", to="y", axis=0)]
    tasks = lower(nodes, dict.fromkeys("aby", (100 * KIB,)), "y")
    found = run_bytes(tasks, [Tensor("y")])
    assert found.one_bytes == 4 * 400 * KIB
    assert found.growth_bytes == (5 * 3 - 4) * 400 * KIB / 2


def test_a_batch_that_shares_fewer_blocks_than_four_requests_do_is_not_under() -> None:
    """Three further requests take 967 KiB each, since the last tensors fit into what the first left. Of five they no
    longer do."""
    sizes = {"a": 100, "b": 400, "c": 200, "y": 200}
    nodes = [node("Erf", before, to=after) for before, after in pairwise(["x", *sizes])]

    def memory_of(requests: int) -> RunBytes:
        shapes: Shapes = {name: (requests * kib * KIB // 4,) for name, kib in sizes.items()}
        return run_bytes(lower(nodes, shapes, "y"), [Tensor("y")])

    one = memory_of(1)
    assert memory_of(4).one_bytes == 4000 * KIB < one.one_bytes + 3 * one.growth_bytes
    assert one.batch_bytes == tuple(memory_of(requests).one_bytes for requests in RUN_BATCHES)
    for requests in (2, 4, 8, 16, 32, 64):
        assert one.one_bytes + one.growth_bytes * (requests - 1) >= memory_of(requests).one_bytes


@pytest.mark.parametrize(
    "nodes",
    [
        [node("ConvTranspose", "x", to="y")],
        [node("ConvTranspose", to="y")],
        [node("Transpose", to="y", perm=[0, 2, 3, 1])],
        [node("Conv", to="y"), node("Relu", "y", to="z")],
        [node("MatMul", "x", to="y"), helper.make_node("Add", ["y"], [])],
    ],
)
def test_nodes_without_the_inputs_or_outputs_that_they_need_are_kernels_like_any_other(nodes: list[NodeProto]) -> None:
    """Whoever made the graph chose them; the runtime refuses it later."""
    shapes = alike("xyz", (1, 16, 8, 8))
    assert len(lower(nodes, shapes, "y", absorbed=(1,))) in (1, 2)
