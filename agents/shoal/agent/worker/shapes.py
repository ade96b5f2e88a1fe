"""Fixes open axes of a model's inputs, for devices that take no open shapes, and where a workload serves but one."""

from collections.abc import Mapping
from typing import Final

from google.protobuf.message import DecodeError

from shoal.inference import onnx_inputs_pb2 as onnx
from shoal.types.codes import Code, refuse

_NAMELESS: Final = ("", "?")
"""Names that say nothing: Paddle's exporter calls every open axis `?`."""


def fix_shapes(data: bytes, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The same model with these shapes of its inputs; -1 leaves an axis open, and so does an input that is not named.

    An axis that several inputs or outputs share by its name is fixed for all of them. The runtime infers the shapes
    behind the inputs.

    Raises ShoalError(MODEL_INVALID) for a shape that an input does not have.
    """
    if not shapes:
        return data
    try:
        model = onnx.ModelInputs.FromString(data)
    except DecodeError as error:
        raise refuse(Code.MODEL_INVALID, "bytes that are no ONNX model", "a model", "push it again") from error
    named: dict[str, int] = {}
    for entry in model.graph.input:
        axes = entry.type.tensor_type.shape.dim
        wanted = shapes.get(entry.name, ())
        if wanted and len(wanted) != len(axes):
            raise _no_such_shape(entry, wanted)
        for axis, length in zip(axes, wanted, strict=False):
            if length < 0:
                continue
            is_fixed, name = axis.HasField("dim_value") and axis.dim_value >= 0, axis.dim_param
            if (is_fixed and axis.dim_value != length) or named.get(name, length) != length:
                raise _no_such_shape(entry, wanted)
            if name not in _NAMELESS:
                named[name] = length
            axis.dim_value = length
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in named:
                axis.dim_value = named[axis.dim_param]
    return model.SerializeToString()


def _no_such_shape(entry: onnx.ValueInfo, wanted: tuple[int, ...]) -> Exception:
    axes = entry.type.tensor_type.shape.dim
    has = [axis.dim_value if axis.HasField("dim_value") else axis.dim_param or -1 for axis in axes]
    found = f"shape {list(wanted)} of {entry.name!r:.80}"
    return refuse(Code.MODEL_INVALID, found, f"one that {has!s:.200} admits", "mend spec.model.shapes")
