"""A model of MLServer: one ONNX Runtime session. BENCH_MODELS is a file with all models, as `ServedModel.spec`."""

# pyright: reportMissingImports=false
import json
import os
from pathlib import Path

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxModel(MLModel):  # type: ignore[misc] # untyped where MLServer is not installed
    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        spec = json.loads(Path(os.environ["BENCH_MODELS"]).read_text())[self.name]
        self._session = onnxruntime.InferenceSession(spec["path"], options, providers=["CPUExecutionProvider"])
        self._outputs = [name for name, _, _ in spec["outputs"]]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        feeds = {each.name: NumpyCodec.decode_input(each) for each in payload.inputs}
        found = self._session.run(self._outputs, feeds)
        outputs = [
            NumpyCodec.encode_output(name=name, payload=value) for name, value in zip(self._outputs, found, strict=True)
        ]
        return InferenceResponse(model_name=self.name, outputs=outputs)
