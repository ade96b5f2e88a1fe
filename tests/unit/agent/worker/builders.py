"""A model's signature and requests for it, as bytes; also for child processes."""

from shoal.inference import open_inference_pb2 as oip
from shoal.types.profile import TensorSpec

MIB = 2**20
INPUTS, OUTPUTS = (TensorSpec("x", "FP32", (-1,)), TensorSpec("n", "INT64", (-1,))), (TensorSpec("y", "FP32", (-1,)),)
EMPTY = b"\x3a\x00"
"""One entry of `raw_input_contents`, of no bytes."""


def typed_request(count: int) -> bytes:
    request = oip.ModelInferRequest()
    tensor = request.inputs.add(name="n", datatype="INT64", shape=[count])
    tensor.contents.int64_contents.extend([1] * count)
    return request.SerializeToString()
