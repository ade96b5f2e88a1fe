"""FLOPs of single nodes, worked out by hand beside each case."""

from collections.abc import Sequence
from typing import Any

import pytest
from onnx import NodeProto, TensorProto, helper

from harness.models.synthetic import FLOAT, INT64, digest_of, graph, ints, model, tensor, weight
from shoal.coordinator.core.graph import profile_of
from shoal.types.profile import ModelProfile, OperatorCost


def profile_model(made: Any) -> ModelProfile:
    content = made.SerializeToString()
    profile = profile_of(content, digest_of(content))
    assert isinstance(profile, ModelProfile), profile
    return profile


def cost_of(profile: ModelProfile, operator: str) -> OperatorCost:
    return next(cost for cost in profile.costs if cost.operator == operator)


def one(
    operator: str,
    shapes: Sequence[Sequence[int]],
    constants: Sequence[TensorProto] = (),
    *,
    outputs: int = 1,
    opset: int = 18,
    dtype: int = FLOAT,
    domain: str = "",
    **attributes: Any,
) -> ModelProfile:
    """The profile of one node whose first inputs are the graph's and whose others are constants."""
    names = [f"x{index}" for index in range(len(shapes))]
    made = [f"y{index}" for index in range(outputs)]
    node: NodeProto = helper.make_node(
        operator, [*names, *(item.name for item in constants)], made, domain=domain, **attributes
    )
    return profile_model(
        model(
            [node],
            [tensor(name, shape, dtype) for name, shape in zip(names, shapes, strict=True)],
            [tensor(name, None) for name in made],
            constants,
            opset=opset,
            domains={domain: 1} if domain else None,
        )
    )


CASES = {
    # 8 outputs of 6x6, each 3x3x3 multiply-adds and a bias: 8*36*(2*27+1)
    "conv": (one("Conv", [(1, 3, 8, 8)], [weight("w", (8, 3, 3, 3)), weight("b", (8,))]), "Conv", 15840),
    # depthwise: each of 4 channels meets its own 3x3: 4*64*2*9
    "depthwise": (one("Conv", [(1, 4, 8, 8)], [weight("w", (4, 1, 3, 3))], group=4, pads=[1] * 4), "Conv", 4608),
    # stride 2, dilation 2 on one axis: 16 -> (16-2*2-1)//2+1 = 6 outputs of 2 channels, 2*(5*3) each
    "conv1d": (one("Conv", [(1, 5, 16)], [weight("w", (2, 5, 3))], strides=[2], dilations=[2]), "Conv", 360),
    # every input element (3*4*4) meets 2x2x2 weights: 48*2*8, and a bias to each of 2*8*8 outputs
    "transposed": (
        one("ConvTranspose", [(1, 3, 4, 4)], [weight("w", (3, 2, 2, 2)), weight("b", (2,))], strides=[2, 2]),
        "ConvTranspose",
        768 + 128,
    ),
    "matmul": (one("MatMul", [(2, 4, 5), (5, 6)]), "MatMul", 2 * 2 * 4 * 5 * 6),
    "vector": (one("MatMul", [(7,), (7,)]), "MatMul", 14),
    # [4,3]' [3->] : A is [3, 4] transposed: 4x3 by 3x5, C added, alpha 2: 2*4*3*5 + 2*20
    "gemm": (one("Gemm", [(3, 4), (3, 5), (5,)], transA=1, alpha=2.0), "Gemm", 120 + 40),
    # batched matrix product written with letters: b i j k = 2*3*4*5 multiply-adds
    "einsum": (one("Einsum", [(2, 3, 4), (2, 4, 5)], equation="bij,bjk->bik"), "Einsum", 240),
    "einsum ellipsis": (one("Einsum", [(2, 3, 4), (4, 5)], equation="...j,jk->...k"), "Einsum", 240),
    # 6 steps, hidden 4, width 3: 6*(2*4*4*(3+4) + 21*4)
    "lstm": (
        one("LSTM", [(6, 1, 3)], [weight("w", (1, 16, 3)), weight("r", (1, 16, 4))], hidden_size=4), "LSTM", 6 * 308,
    ),
    # both directions, 3 gates: 6*2*(2*3*4*7 + 17*4)
    "gru": (
        one("GRU", [(6, 1, 3)], [weight("w", (2, 12, 3)), weight("r", (2, 12, 4))], hidden_size=4,
            direction="bidirectional"), "GRU", 12 * 236,
    ),
    "rnn": (one("RNN", [(6, 1, 3)], [weight("w", (1, 4, 3)), weight("r", (1, 4, 4))], hidden_size=4), "RNN", 6 * 72),
    "pool": (one("MaxPool", [(1, 2, 8, 8)], kernel_shape=[3, 3], strides=[2, 2]), "MaxPool", 2 * 9 * 9),
    "global pool": (one("GlobalAveragePool", [(1, 2, 8, 8)]), "GlobalAveragePool", 128),
    "norm": (one("LayerNormalization", [(1, 10, 8)], [weight("s", (8,))]), "LayerNormalization", 7 * 80),
    "batch norm": (
        one("BatchNormalization", [(1, 4, 5, 5)], [weight(name, (4,)) for name in "sbmv"]), "BatchNormalization", 200,
    ),
    "softmax": (one("Softmax", [(1, 10)]), "Softmax", 50),
    "broadcast": (one("Add", [(3, 1), (1, 4)]), "Add", 12),
    "reduce": (one("ReduceMean", [(2, 8)], [ints("axes", [1])]), "ReduceMean", 16),
    "clip": (one("Clip", [(5, 5)]), "Clip", 50),
    # 4 multiplies and 3 adds for each of 2*8*8
    "bilinear": (
        one("Resize", [(1, 2, 4, 4)], [weight("roi", (0,)), helper.make_tensor("s", FLOAT, [4], [1, 1, 2, 2])],
            mode="linear"), "Resize", 7 * 128,
    ),
    "nearest": (
        one("Resize", [(1, 2, 4, 4)], [weight("roi", (0,)), helper.make_tensor("s", FLOAT, [4], [1, 1, 2, 2])]),
        "Resize", 0,
    ),
    "view": (one("Reshape", [(2, 6)], [ints("to", [3, -1])]), "Reshape", 0),
    # 2 heads of 4 over 5 queries and 7 keys: 2*5*7*(2*(4+4) + 6)
    "attention": (
        one("Attention", [(1, 2, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4)], opset=23), "Attention", 70 * 22,
    ),
    "fused": (one("FusedMatMul", [(5, 4), (6, 5)], domain="com.microsoft", transA=1, transB=1),
              "com.microsoft:FusedMatMul", 2 * 4 * 5 * 6),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_flops_are_those_worked_out_by_hand(case: str) -> None:
    profile, operator, flops = CASES[case]
    assert cost_of(profile, operator).flops == flops
    assert profile.confident


def test_bytes_are_each_tensor_once_and_a_view_moves_nothing() -> None:
    conv = one("Conv", [(1, 3, 8, 8)], [weight("w", (8, 3, 3, 3)), weight("b", (8,))])
    assert cost_of(conv, "Conv").bytes == 4 * (3 * 64 + 8 * 27 + 8 + 8 * 36)
    assert cost_of(one("Reshape", [(2, 6)], [ints("to", [12])]), "Reshape").bytes == 0


def test_indexing_reads_what_it_returns() -> None:
    """3 rows of an embedding of 1000 rows: 3 rows read, 3 written, 3 indices."""
    profile = profile_model(
        model(
            [helper.make_node("Gather", ["table", "ids"], ["y"])],
            [tensor("ids", [3], INT64)],
            [tensor("y", None)],
            [weight("table", (1000, 16))],
        )
    )
    assert cost_of(profile, "Gather").bytes == 2 * 3 * 16 * 4 + 3 * 8


def test_an_operator_without_a_formula_leaves_a_lower_bound() -> None:
    profile = one("CropAndResize", [(1, 2, 8, 8)], domain="com.microsoft")
    assert cost_of(profile, "com.microsoft:CropAndResize").flops == 0
    assert not profile.confident


def test_resnet50_costs_what_is_published() -> None:
    """4 089 184 256 multiply-adds in convolutions and the classifier at 224 x 224 (He et al. 2015 give 3.8e9 for the
    first variant; the one with the stride in the 3x3 convolution, as everybody ships it, has 4.09e9)."""
    nodes: list[NodeProto] = []
    inputs = [tensor("x", ["N", 3, 224, 224])]

    def conv(source: str, channels: tuple[int, int], kernel: int, stride: int = 1) -> str:
        name = f"t{len(nodes)}"
        inputs.append(tensor(f"w{len(nodes)}", [channels[1], channels[0], kernel, kernel]))
        pads = [kernel // 2] * 4
        nodes.append(helper.make_node("Conv", [source, inputs[-1].name], [name], strides=[stride] * 2, pads=pads))
        return name

    def node(operator: str, sources: list[str], **attributes: Any) -> str:
        name = f"t{len(nodes)}"
        nodes.append(helper.make_node(operator, sources, [name], **attributes))
        return name

    at = node("MaxPool", [conv("x", (3, 64), 7, 2)], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    width = 64
    for stage, (blocks, inner) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            out = conv(conv(conv(at, (width, inner), 1), (inner, inner), 3, stride), (inner, 4 * inner), 1)
            short = at if block else conv(at, (width, 4 * inner), 1, stride)
            at, width = node("Relu", [node("Add", [out, short])]), 4 * inner
    flat = node("Flatten", [node("GlobalAveragePool", [at])])
    inputs.append(tensor("fc", [2048, 1000]))
    nodes.append(helper.make_node("Gemm", [flat, "fc"], ["y"]))
    profile = profile_model(model(nodes, inputs, [tensor("y", [None, 1000])]))
    assert cost_of(profile, "Conv").nodes == 53
    assert cost_of(profile, "Conv").flops + cost_of(profile, "Gemm").flops == 2 * 4_089_184_256
    assert profile.confident


def test_a_body_is_counted_as_often_as_it_runs() -> None:
    """5 trips of a body that adds 3 elements and multiplies 3."""
    body = graph(
        [
            helper.make_node("Add", ["s", "x"], ["t"]),
            helper.make_node("Mul", ["t", "t"], ["s2"]),
            helper.make_node("Identity", ["c"], ["c2"]),
        ],
        [tensor("i", [], INT64), tensor("c", [], TensorProto.BOOL), tensor("s", [3])],
        [tensor("c2", [], TensorProto.BOOL), tensor("s2", [3]), tensor("t", [3])],
    )
    profile = profile_model(
        model(
            [helper.make_node("Loop", ["n", "", "x"], ["y", "all"], body=body)],
            [tensor("x", [3])],
            [tensor("y", [3]), tensor("all", [None, 3])],
            [ints("n", 5)],
        )
    )
    assert cost_of(profile, "Add").flops == 15
    assert cost_of(profile, "Mul").flops == 15
    assert profile.activation_bytes >= 5 * 3 * 4  # the stacked output
    assert profile.confident
