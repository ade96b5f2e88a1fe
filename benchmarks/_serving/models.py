"""The models that all servers serve, their inputs, and the answers that are right."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from shoal.client.tensors import datatype_of
from shoal.inference import open_inference_pb2 as oip

SMALL: Final = "small"
CLASSIFIER: Final = "classifier"
MAGIKA: Final = "magika"
MB1: Final = "tensor-1mb"
MB4: Final = "tensor-4mb"
RECOGNISER: Final = "recogniser"
CHARACTER: Final = "recogniser-32"
LINE: Final = "recogniser-640"
TILE: Final = "detector-64"
CROP: Final = "detector-96"
SERVED: Final = (SMALL, CLASSIFIER, MAGIKA, MB1, MB4)
"""What `serving` measures."""
FLOATS: Final = {SMALL: 64, MB1: 2**18, MB4: 2**20}
"""Elements (float32) of the models that answer their input."""

PICTURES: Final[Mapping[str, tuple[str, int, int]]] = {
    CLASSIFIER: ("ch_ppocr_mobile_v2.0_cls_infer", 48, 192),
    CHARACTER: ("ch_PP-OCRv4_rec_infer", 48, 32),
    RECOGNISER: ("ch_PP-OCRv4_rec_infer", 48, 320),
    LINE: ("ch_PP-OCRv4_rec_infer", 48, 640),
    TILE: ("ch_PP-OCRv4_det_infer", 64, 64),
    CROP: ("ch_PP-OCRv4_det_infer", 96, 96),
}
"""PP-OCR's models, with height and width in pixels of the picture that each is asked for. The recogniser takes strips
of any width: its own package cuts them 320 wide and more, 32 hold one character."""

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, one request, and its answer."""

    # Name by which every server serves it.
    name: str
    # Its ONNX file.
    path: Path
    # The request, the same each time.
    inputs: Arrays
    # The answer of ONNX Runtime in process.
    outputs: Arrays

    @property
    def answer_bytes(self) -> int:
        return sum(value.nbytes for value in self.outputs.values())

    def grpc_message(self) -> bytes:
        """ModelInferRequest as gRPC frames it: a byte for compression, a length of 4 bytes, the message."""
        message = oip.ModelInferRequest(
            model_name=self.name,
            inputs=[
                oip.ModelInferRequest.InferInputTensor(name=name, datatype=datatype_of(value), shape=value.shape)
                for name, value in self.inputs.items()
            ],
            raw_input_contents=[value.tobytes() for value in self.inputs.values()],
        ).SerializeToString()
        return b"\0" + len(message).to_bytes(4, "big") + message

    def json_body(self) -> bytes:
        """The request in the Open Inference Protocol's JSON, tensors as numbers."""
        inputs = [
            {
                "name": name,
                "shape": list(value.shape),
                "datatype": datatype_of(value),
                "data": value.ravel().tolist(),
            }
            for name, value in self.inputs.items()
        ]
        return json.dumps({"inputs": inputs}).encode()

    def spec(self) -> dict[str, Any]:
        """What a peer needs to serve it: file, and (name, dtype, shape) of inputs and outputs."""
        return {
            "path": str(self.path),
            "inputs": _tensors(self.inputs),
            "outputs": _tensors(self.outputs),
        }


def _tensors(arrays: Arrays) -> list[tuple[str, str, list[int]]]:
    return [(name, value.dtype.name, list(value.shape)) for name, value in arrays.items()]


def served_model(name: str, folder: Path) -> ServedModel:
    """folder: where the file of a model that is made here goes. Raises SystemExit where its wheel is not installed."""
    rng = np.random.default_rng(7)
    if name in PICTURES:
        file, height, width = PICTURES[name]
        path = _package("rapidocr_onnxruntime") / "models" / f"{file}.onnx"
        return _with_answer(name, path, {"x": rng.random((1, 3, height, width), np.float32)})
    if name == MAGIKA:
        path = sorted((_package("magika") / "models").glob("*/model.onnx"))[-1]
        return _with_answer(name, path, {"bytes": rng.integers(0, 256, (1, 2048), np.int32)})
    return _identity(name, FLOATS[name], folder, rng)


def one_thread_session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _identity(name: str, count: int, folder: Path, rng: np.random.Generator) -> ServedModel:
    tensors = [helper.make_tensor_value_info(each, TensorProto.FLOAT, [1, count]) for each in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", tensors[:1], tensors[1:])
    path = folder / f"{name}.onnx"
    # an IR and an opset that the oldest runtime of a peer reads
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return _with_answer(name, path, {"x": rng.random((1, count), np.float32)})


def _with_answer(name: str, path: Path, inputs: dict[str, NDArray[Any]]) -> ServedModel:
    session = one_thread_session(path)
    names = [output.name for output in session.get_outputs()]
    return ServedModel(name, path, inputs, dict(zip(names, session.run(None, inputs), strict=True)))


def _package(name: str) -> Path:
    found = find_spec(name)
    if found is None or found.origin is None:
        raise SystemExit(f"{name} is not installed: make dev")
    return Path(found.origin).parent
