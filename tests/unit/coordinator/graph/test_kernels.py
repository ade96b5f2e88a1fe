"""Which kernels a graph takes: what a runtime fuses and folds, by kind."""

from collections import Counter

import numpy as np
import pytest
from onnx import NodeProto, helper, numpy_helper

from harness.models.synthetic import digest_of, model, tensor, weight
from shoal.coordinator.core.graph import profile_of
from shoal.types.profile import KERNEL_KINDS, ModelProfile

W, BN = weight("w", (8, 8, 3, 3)), [weight(name, (8,)) for name in "gbmv"]
IMAGE = [1, 8, 6, 6]


def profile(nodes: list[NodeProto], shape: list[int] = IMAGE) -> ModelProfile:
    constants = [W, *BN, weight("one", (8, 1, 3, 3)), weight("point", (8, 8, 1, 1)), weight("half", (8, 4, 3, 3))]
    constants += [weight("square", (6, 6)), numpy_helper.from_array(np.array(2, np.float32), "two")]
    made = model(nodes, [tensor("x", shape)], [tensor(nodes[-1].output[0], None)], constants).SerializeToString()
    found = profile_of(made, digest_of(made))
    assert isinstance(found, ModelProfile), found
    return found


def kernels(nodes: list[NodeProto], shape: list[int] = IMAGE) -> Counter[str]:
    found = profile(nodes, shape)
    assert {each.kind for each in found.kernels} <= set(KERNEL_KINDS)
    return Counter({each.kind: int(each.launches) for each in found.kernels})


def conv(x: str, y: str, weights: str = "w", groups: int = 1) -> NodeProto:
    around = 0 if weights == "point" else 1
    return helper.make_node("Conv", [x, weights], [y], group=groups, pads=[around] * 4)


def test_a_block_of_a_residual_network_is_its_convolutions() -> None:
    block = [
        conv("x", "a"),
        helper.make_node("BatchNormalization", ["a", "g", "b", "m", "v"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        conv("r", "c"),
        helper.make_node("Add", ["c", "x"], ["s"]),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    assert kernels(block) == {"conv": 2}
    found = profile(block)
    assert found.layout_copies == 2, "of r, which a convolution of few channels reads in the usual layout, and of y"
    assert found.layout_bytes == 2 * 2 * 4 * 8 * 36, "read and written"


def test_what_two_read_is_not_fused() -> None:
    branch = [conv("x", "a"), helper.make_node("Relu", ["a"], ["r"]), helper.make_node("Add", ["a", "r"], ["y"])]
    assert kernels(branch) == {"conv": 1, "elementwise": 2}


@pytest.mark.parametrize(
    ("weights", "groups", "kind"),
    [("w", 1, "conv"), ("point", 1, "pointwise"), ("half", 2, "grouped"), ("one", 8, "depthwise")],
)
def test_kinds_of_convolutions(weights: str, groups: int, kind: str) -> None:
    nodes = [conv("x", "y", weights, groups)]
    assert kernels(nodes) == {kind: 1}
    assert profile(nodes).layout_copies == (groups == 1), "of the result"


@pytest.mark.parametrize(
    ("weights", "groups", "by_8", "by_16"),
    [
        ((24, 32, 3, 3), 1, 24 * 32, 32 * 32),
        ((20, 20, 3, 3), 1, 24 * 24, 32 * 32),
        # A convolution of few channels reads them as they are.
        ((24, 12, 3, 3), 1, 24 * 16, 32 * 12),
        ((64, 32, 1, 1), 1, 64 * 32, 64 * 32),
        # Not in blocks.
        ((20, 18, 3, 3), 1, 20 * 18, 20 * 18),
        ((20, 10, 3, 3), 1, 20 * 10, 32 * 10),
        ((20, 32, 3), 1, 20 * 32, 20 * 32),
        ((32, 1, 3, 3), 32, 32, 32),
    ],
)
def test_whole_blocks_of_channels_are_multiplied(weights: tuple[int, ...], groups: int, by_8: int, by_16: int) -> None:
    made, each, *sides = weights
    image = [2, each * groups, *(6 for _ in sides)]
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], group=groups, pads=[side // 2 for side in sides] * 2)]
    content = model(nodes, [tensor("x", image)], [tensor("y", None)], [weight("w", weights)]).SerializeToString()
    found = profile_of(content, digest_of(content))
    assert isinstance(found, ModelProfile), found
    (kernel,) = found.kernels
    shares = [1 + each / kernel.flops for each in kernel.padding_flops or (0.0, 0.0)]
    assert shares == pytest.approx([by_8 / (made * each), by_16 / (made * each)])
    assert found.costs[0].flops == kernel.flops, "zeros are no work of the model"


def test_what_a_graph_inside_a_node_reads_is_not_fused() -> None:
    """The If reads what the convolution makes, so that Relu has to leave it as it is."""
    one, other = (
        helper.make_graph([helper.make_node(operator, ["a"], [side])], side, [], [tensor(side, None)])
        for side, operator in (("then", "Neg"), ("else", "Abs"))
    )
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "two"], ["is_large"]),
        conv("x", "a"),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("If", ["is_large"], ["i"], then_branch=one, else_branch=other),
        helper.make_node("Concat", ["r", "i"], ["y"], axis=1),
    ]
    found = kernels(nodes)
    assert found["elementwise"] == 3, "Greater, Relu, and one of Neg and Abs"
    assert profile(nodes).layout_copies == 2, "of a for the If, and of r"


def test_constants_are_folded_and_views_are_free() -> None:
    nodes = [
        helper.make_node("Mul", ["square", "two"], ["scaled"]),
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("MatMul", ["same", "scaled"], ["y"]),
    ]
    assert kernels(nodes) == {"matmul": 1}


def test_attention_multiplies_what_was_computed() -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["x", "t"], ["p"]),
        helper.make_node("Softmax", ["p"], ["y"]),
    ]
    assert kernels(nodes) == {"copy": 1, "attention": 1, "reduction": 1}


def test_a_gate_and_its_product_are_one_kernel() -> None:
    gate = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])]
    assert kernels(gate) == {"transcendental": 1}


@pytest.mark.parametrize(
    ("nearest", "factor", "copies"),
    [("floor", 2.0, 0), ("round_prefer_floor", 2.0, 2), ("floor", 1.5, 2)],
)
def test_a_resize_to_so_many_equal_pixels_works_on_blocks(nearest: str, factor: float, copies: int) -> None:
    """Otherwise what it reads is copied out of blocks, and what it makes into them."""
    nodes = [
        helper.make_node("Conv", ["x", "wide"], ["a"]),
        helper.make_node(
            "Resize",
            ["a", "", "scales"],
            ["b"],
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode=nearest,
        ),
        helper.make_node("Conv", ["b", "wide"], ["y"]),
    ]
    constants = [weight("wide", (32, 32, 1, 1))]
    constants.append(numpy_helper.from_array(np.array([1, 1, factor, factor], np.float32), "scales"))
    made = model(nodes, [tensor("x", [1, 32, 8, 8])], [tensor("y", None)], constants).SerializeToString()
    found = profile_of(made, digest_of(made))
    assert isinstance(found, ModelProfile), found
    assert found.layout_copies == 2 + copies, "of x and y as well"
