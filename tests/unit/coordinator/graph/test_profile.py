"""What a profile says beyond FLOPs: interface, weights, precision, live tensors, branches, functions, metadata."""

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from harness.models.synthetic import BOOL, FLOAT, INT64, digest_of, graph, ints, model, relu, tensor, weight
from shoal.coordinator.core.graph import Rules, profile_of
from shoal.types.codes import Code, Refusal
from shoal.types.profile import ModelProfile, TensorSpec
from shoal.types.units import Bytes


def profile_model(made: ModelProto, rules: Rules | None = None) -> ModelProfile:
    content = made.SerializeToString()
    profile = profile_of(content, digest_of(content), rules or Rules())
    assert isinstance(profile, ModelProfile), profile
    return profile


def chain(*operators: str) -> list[Any]:
    return [helper.make_node(op, [f"t{i}"], [f"t{i + 1}"]) for i, op in enumerate(operators)]


def test_interface_and_identity_are_read_as_they_stand() -> None:
    made = model(
        [helper.make_node("Cast", ["ids"], ["y"], to=FLOAT), helper.make_node("Identity", ["text"], ["same"])],
        [tensor("ids", ["batch", None], INT64), tensor("text", [3], TensorProto.STRING)],
        [tensor("y", ["batch", None]), tensor("same", [3], TensorProto.STRING)],
        opset=17,
    )
    profile = profile_model(made)
    assert profile.inputs == (TensorSpec("ids", "INT64", (-1, -1)), TensorSpec("text", "BYTES", (3,)))
    assert profile.outputs == (TensorSpec("y", "FP32", (-1, -1)), TensorSpec("same", "BYTES", (3,)))
    assert profile.reference_shapes == {"ids": (1, 128), "text": (3,)}
    assert (profile.opset, profile.ir_version, profile.domains) == (17, 10, {"ai.onnx": 17})
    assert profile.producer == "crafted"
    assert profile.size_bytes == len(made.SerializeToString())


def test_an_output_without_a_declared_shape_has_as_many_open_axes_as_it_will_have() -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"])], [tensor("x", ["N", 4])], [tensor("y", None)])
    assert profile_model(made).outputs == (TensorSpec("y", "FP32", (-1, -1)),)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (TensorProto.BOOL, "BOOL"), (TensorProto.UINT8, "UINT8"), (TensorProto.UINT16, "UINT16"),
        (TensorProto.UINT32, "UINT32"), (TensorProto.UINT64, "UINT64"), (TensorProto.INT8, "INT8"),
        (TensorProto.INT16, "INT16"), (TensorProto.INT32, "INT32"), (TensorProto.INT64, "INT64"),
        (TensorProto.FLOAT16, "FP16"), (TensorProto.FLOAT, "FP32"), (TensorProto.DOUBLE, "FP64"),
        (TensorProto.STRING, "BYTES"), (TensorProto.BFLOAT16, "BF16"),
    ],
)  # fmt: skip
def test_every_type_of_the_inference_protocol(dtype: int, name: str) -> None:
    made = model([helper.make_node("Identity", ["x"], ["y"])], [tensor("x", [2], dtype)], [tensor("y", [2], dtype)])
    assert profile_model(made).inputs[0].dtype == name


def test_weights_are_initializers_and_constants_and_decide_the_precision() -> None:
    """int8 weights of 64 bytes outweigh fp32 scales of 2 x 4; indices of 80 bytes say nothing."""
    made = model(
        [
            helper.make_node("Constant", [], ["zero"], value=weight("", (), np.int8)),
            helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["f"]),
            helper.make_node("MatMul", ["x", "f"], ["m"]),
            helper.make_node("Mul", ["m", "gain"], ["n"]),
            helper.make_node("Gather", ["n", "at"], ["y"], axis=1),
        ],
        [tensor("x", ["N", 8])],
        [tensor("y", None)],
        [weight("w", (8, 8), np.int8), weight("scale", ()), weight("gain", (1,)), ints("at", [0] * 10)],
    )
    profile = profile_model(made)
    assert profile.weight_bytes == 64 + 4 + 4 + 80 + 1
    assert profile.largest_weight_bytes == 80
    assert profile.precision == "int8"


def test_the_largest_convolution_is_found_among_equally_intense_ones() -> None:
    """One of them has nearly all weights, so that their mean says little. A larger weight is no convolution's."""
    outputs = [16, 16, 16, 256]
    channels = [16, *outputs]
    made = model(
        [
            *(helper.make_node("Conv", [f"t{i}", f"w{i}"], [f"t{i + 1}"]) for i in range(len(outputs))),
            helper.make_node("Gather", ["table", "at"], ["y"]),
        ],
        [tensor("t0", [1, 16, 32, 32])],
        [tensor(f"t{len(outputs)}", None), tensor("y", None)],
        [
            *(weight(f"w{i}", (after, channels[i], 3, 3)) for i, after in enumerate(outputs)),
            *(weight("table", (1000, 64)), ints("at", [0])),
        ],
    )
    profile = profile_model(made)
    assert profile.largest_convolution_bytes == 4 * 256 * 16 * 9
    assert profile.largest_weight_bytes == 4 * 1000 * 64


def test_what_a_kernel_takes_besides_its_tensors_is_bounded_as_well() -> None:
    """A transposed convolution multiplies into as many columns as it has positions and weights."""
    made = model(
        [
            helper.make_node("ConstantOfShape", ["sides"], ["w"]),
            helper.make_node("ConvTranspose", ["x", "w"], ["y"], pads=[39_000] * 4),
        ],
        [tensor("x", [1, 1, 80_000, 80_000])],
        [tensor("y", None)],
        [ints("sides", [1, 1, 70_000, 70_000])],
    )
    content = made.SerializeToString()
    refused = profile_of(content, digest_of(content))
    assert isinstance(refused, Refusal)
    assert refused.code is Code.MODEL_INVALID
    assert "absurd size" in refused.remedy


def test_without_weights_the_precision_is_that_of_the_input() -> None:
    half = model(chain("Relu"), [tensor("t0", [2], TensorProto.FLOAT16)], [tensor("t1", [2], TensorProto.FLOAT16)])
    assert profile_model(half).precision == "fp16"


def test_a_tensor_lives_from_its_maker_to_its_last_reader() -> None:
    """The input (1) is held; two of the big intermediates (100 each) live at once, never three."""
    made = model(
        [
            helper.make_node("Expand", ["t0", "hundred"], ["t1"]),
            *[helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"]) for i in range(1, 5)],
            helper.make_node("ReduceMax", ["t5"], ["y"]),
        ],
        [tensor("t0", [1])],
        [tensor("y", None)],
        [ints("hundred", [100])],
    )
    assert profile_model(made).activation_bytes == 4 * (1 + 200)


def test_a_tensor_that_is_read_late_is_held_until_then() -> None:
    """t1 stays for the last addition: at it t1, t4 and the sum live, beside the input."""
    made = model(
        [*chain("Relu", "Exp", "Neg", "Abs"), helper.make_node("Add", ["t1", "t4"], ["y"])],
        [tensor("t0", [10])],
        [tensor("y", [10])],
    )
    assert profile_model(made).activation_bytes == 4 * 10 * 4


def test_a_view_lives_in_its_inputs_memory() -> None:
    made = model(
        [
            helper.make_node("Relu", ["x"], ["a"]),
            helper.make_node("Flatten", ["a"], ["b"]),
            helper.make_node("Exp", ["b"], ["c"]),
            helper.make_node("Add", ["b", "c"], ["y"]),
        ],
        [tensor("x", [2, 5])],
        [tensor("y", [2, 5])],
    )
    assert profile_model(made).activation_bytes == 4 * 10 * 4  # x, a (which b is), c, y


def branches(condition: str) -> ModelProto:
    """then: 100 elements doubled (100 FLOPs); else: 10 elements reduced three times (30)."""
    then = graph([helper.make_node("Add", ["big", "big"], ["r"])], [], [tensor("r", None)])
    other = graph(
        [
            helper.make_node("Relu", ["small"], ["p"]),
            helper.make_node("Relu", ["p"], ["q"]),
            helper.make_node("Relu", ["q"], ["r2"]),
        ],
        [],
        [tensor("r2", None)],
    )
    return model(
        [helper.make_node("If", [condition], ["y"], then_branch=then, else_branch=other)],
        [tensor("big", [100]), tensor("small", [10]), tensor("asked", [], BOOL)],
        [tensor("y", None)],
        [helper.make_tensor("never", BOOL, [], [False])],
    )


def test_of_an_unknown_branch_the_dearer_counts_and_both_are_listed() -> None:
    profile = profile_model(branches("asked"))
    assert profile.flops == 100
    assert profile.operators == ("Add", "If", "Relu")


def test_a_constant_condition_decides_the_branch() -> None:
    assert profile_model(branches("never")).flops == 30


def test_a_function_is_counted_at_every_call_with_its_attributes() -> None:
    """Scale(x; axis) = Softmax(x, axis) + x: 5 n + n, called twice on 12 elements."""
    softmax = helper.make_node("Softmax", ["a"], ["s"])
    softmax.attribute.add(name="axis", ref_attr_name="along", type=2)
    function = helper.make_function(
        "own", "Scale", ["a"], ["b"], [softmax, helper.make_node("Add", ["s", "a"], ["b"])],
        [helper.make_opsetid("", 18)], ["along"],
    )  # fmt: skip
    calls = [
        helper.make_node("Scale", ["x"], ["t"], domain="own", along=0),
        helper.make_node("Scale", ["t"], ["y"], domain="own", along=1),
    ]
    profile = profile_model(
        model(calls, [tensor("x", [3, 4])], [tensor("y", [3, 4])], domains={"own": 1}, functions=[function])
    )
    assert profile.flops == 2 * 6 * 12
    assert profile.operators == ("Add", "Softmax")
    assert profile.confident


def nodes_of_fewer_results() -> dict[str, ModelProto]:
    """Nodes with two outputs, of whose bodies one returns fewer."""
    x, y, flag, count = tensor("x", [4]), tensor("y", None), tensor("flag", [], BOOL), tensor("count", [], INT64)
    branch = graph([helper.make_node("Relu", ["x"], ["r"])], [], [tensor("r", None)])
    body = graph(
        [helper.make_node("Identity", ["on"], ["goes_on"]), helper.make_node("Relu", ["state"], ["next"])],
        [tensor("trip", [], INT64), tensor("on", [], BOOL), tensor("state", [4])],
        [tensor("goes_on", [], BOOL), tensor("next", [4])],
    )
    function = helper.make_function(
        "own", "Own", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], [helper.make_opsetid("", 18)]
    )  # fmt: skip
    nodes = {
        "If": helper.make_node("If", ["flag"], ["s", "t"], then_branch=branch, else_branch=branch),
        "Loop": helper.make_node("Loop", ["count", "flag", "x"], ["s", "t"], body=body),
        "function": helper.make_node("Own", ["x"], ["s", "t"], domain="own"),
    }
    after = helper.make_node("Add", ["s", "t"], ["y"])
    return {
        kind: model([each, after], [x, flag, count], [y], domains={"own": 1}, functions=[function])
        for kind, each in nodes.items()
    }


@pytest.mark.parametrize("kind", ["If", "Loop", "function"])
def test_a_node_with_more_outputs_than_its_body_returns_has_a_profile(kind: str) -> None:
    profile = profile_model(nodes_of_fewer_results()[kind])
    assert "Relu" in profile.operators
    assert not profile.confident


def test_shapes_computed_from_shapes_are_followed() -> None:
    """Reshape to [batch, rest / 2, 2] by Shape, Gather, Div, Concat, as exporters write it."""
    made = model(
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Gather", ["s", "first"], ["n"]),
            helper.make_node("Gather", ["s", "second"], ["w"]),
            helper.make_node("Div", ["w", "two"], ["h"]),
            helper.make_node("Concat", ["n", "h", "two"], ["to"], axis=0),
            helper.make_node("Reshape", ["x", "to"], ["r"]),
            helper.make_node("MatMul", ["r", "m"], ["y"]),
        ],
        [tensor("x", ["N", 64])],
        [tensor("y", None)],
        [ints("first", [0]), ints("second", [1]), ints("two", [2]), weight("m", (2, 3))],
    )
    profile = profile_model(made)
    assert next(c for c in profile.costs if c.operator == "MatMul").flops == 2 * 32 * 3 * 2
    assert profile.confident


def test_sizes_that_fit_the_network_are_found() -> None:
    """The height must become 1 after a pool of 48: only a line of text fits, though the model does not say so."""
    made = model(
        [
            helper.make_node("AveragePool", ["x"], ["p"], kernel_shape=[48, 1]),
            helper.make_node("Squeeze", ["p", "axis"], ["s"]),
            helper.make_node("Relu", ["s"], ["y"]),
        ],
        [tensor("x", ["N", 3, None, None])],
        [tensor("y", None)],
        [ints("axis", [2])],
    )
    profile = profile_model(made)
    assert profile.reference_shapes["x"] == (1, 3, 48, 320)
    assert profile.confident


def test_a_shape_that_depends_on_data_is_admitted() -> None:
    made = model(
        [helper.make_node("NonZero", ["x"], ["at"]), helper.make_node("Abs", ["at"], ["y"])],
        [tensor("x", [4])],
        [tensor("y", None, INT64)],
    )
    assert not profile_model(made).confident


def test_long_metadata_stays_in_the_model() -> None:
    made = relu()
    helper.set_model_props(made, {"task": "ocr", "character": "x" * 5000})
    assert profile_model(made).metadata == {"task": "ocr"}


def test_what_one_run_holds_is_limited() -> None:
    content = relu().SerializeToString()
    refused = profile_of(content, digest_of(content), Rules(max_activation_bytes=16))  # type: ignore[arg-type]
    assert isinstance(refused, Refusal)
    assert refused.code is Code.MODEL_INVALID


def test_lengths_that_are_given_come_before_those_that_are_chosen() -> None:
    """Also where another input has the same symbol; costs are counted at them."""
    made = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["z"], ["r"])],
        [tensor("x", ["batch", "length", 4]), tensor("w", [4, 8]), tensor("z", ["length", 2])],
        [tensor("y", None), tensor("r", None)],
    )
    content = made.SerializeToString()
    found = profile_of(content, digest_of(content), shapes={"x": (-1, 300, 4)})
    assert isinstance(found, ModelProfile)
    assert found.reference_shapes == {"x": (1, 300, 4), "w": (4, 8), "z": (300, 2)}
    assert next(cost.flops for cost in found.costs if cost.operator == "MatMul") == 2 * 300 * 4 * 8


@pytest.mark.parametrize("shapes", [{"none": (1,)}, {"x": (1, 2, 3)}, {"x": (2, 5)}, {"x": ()}])
def test_lengths_that_the_model_does_not_have_are_refused(shapes: dict[str, tuple[int, ...]]) -> None:
    content = model([helper.make_node("Relu", ["x"], ["y"])], [tensor("x", ["N", 4])], [tensor("y", None)])
    text = content.SerializeToString()
    found = profile_of(text, digest_of(text), shapes=shapes)
    assert isinstance(found, Refusal)
    assert found.code is Code.INVALID_ARGUMENT


def test_two_lengths_of_one_axis_are_refused() -> None:
    """Nothing could run at them, which a node would find out at its warm-up."""
    content = model(
        [helper.make_node("Add", ["x", "y"], ["z"])],
        [tensor("x", ["N", 4]), tensor("y", ["N", 4])],
        [tensor("z", None)],
    ).SerializeToString()
    found = profile_of(content, digest_of(content), shapes={"x": (3, 4), "y": (5, 4)})
    assert isinstance(found, Refusal)
    assert found.code is Code.INVALID_ARGUMENT
    assert isinstance(profile_of(content, digest_of(content), shapes={"x": (3, 4), "y": (-1, 4)}), ModelProfile)


def test_absurd_lengths_are_refused_for_what_they_would_hold() -> None:
    content = model([helper.make_node("Relu", ["x"], ["y"])], [tensor("x", ["N", 4])], [tensor("y", None)])
    text = content.SerializeToString()
    found = profile_of(
        text, digest_of(text), shapes={"x": (2**31 - 1, 4)}, rules=Rules(max_activation_bytes=Bytes(2**30))
    )
    assert isinstance(found, Refusal)
    assert found.code is Code.MODEL_INVALID
