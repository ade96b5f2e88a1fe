"""An unmodified tritonclient that passes tensors in system shared memory, in its own process as `triton_child`.

Usage: python -m harness.clients.triton_shared_memory SPEC. SPEC: JSON with transport, url, authority, certificate, key,
model and prefix. The model transposes in_FP32 and in_BYTES. Prints JSON: what the front said of the regions, which
answers were right, and errors.
"""

import base64
import json
import sys
from functools import partial
from queue import Queue
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException, serialize_byte_tensor
from tritonclient.utils import shared_memory as shm

from harness.clients.triton_child import client_of

NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3)
TEXTS = np.array([[b"", b"one"], ["zwölf".encode(), b"\0x"]], dtype=object)
WIDTH = 64
"""Bytes of the region of each tensor."""


class Regions:
    """Four regions in two files: the inputs' at offsets of one, the outputs' of the other."""

    def __init__(self, client: Any, prefix: str) -> None:
        self.client = client
        self.handles = {
            side: shm.create_shared_memory_region(side, f"/{prefix}{side}", 2 * WIDTH, create_only=True)
            for side in ("in", "out")
        }
        for side, handle in self.handles.items():
            for number, name in enumerate(("FP32", "BYTES")):
                region = f"{side}_{name}"
                client.register_system_shared_memory(region, handle._shm_key, WIDTH, number * WIDTH)
        self.texts = serialize_byte_tensor(TEXTS).item()
        shm.set_shared_memory_region(self.handles["in"], [NUMBERS])
        shm.set_shared_memory_region(self.handles["in"], [np.array(self.texts, object)], offset=WIDTH)

    def read(self) -> list[str]:
        """Which tensors lie transposed in the outputs' file; it is overwritten."""
        numbers = shm.get_contents_as_numpy(self.handles["out"], np.float32, [3, 2]).copy()
        raw = bytes(shm.get_contents_as_numpy(self.handles["out"], np.uint8, [WIDTH], offset=WIDTH))
        shm.set_shared_memory_region(self.handles["out"], [np.full(2 * WIDTH, 7, np.uint8)])
        found = ["numbers"] if (numbers == NUMBERS.T).all() else []
        return found + (["texts"] if raw.startswith(serialize_byte_tensor(TEXTS.T).item()) else [])

    def close(self) -> None:
        for each in self.handles.values():
            shm.destroy_shared_memory_region(each)


def inputs_of(triton: Any, regions: Regions, *, shared: bool) -> list[Any]:
    numbers, texts = triton.InferInput("in_FP32", [2, 3], "FP32"), triton.InferInput("in_BYTES", [2, 2], "BYTES")
    if shared:
        numbers.set_shared_memory("in_FP32", NUMBERS.nbytes)
        texts.set_shared_memory("in_BYTES", len(regions.texts))
    else:
        numbers.set_data_from_numpy(NUMBERS)
        texts.set_data_from_numpy(TEXTS)
    return [numbers, texts]


def outputs_of(triton: Any, *shared: str) -> list[Any]:
    made = [triton.InferRequestedOutput(name) for name in ("out_FP32", "out_BYTES")]
    for each in made:
        if each.name() in shared:
            each.set_shared_memory(each.name(), WIDTH)
    return made


def stream(client: Any, model: str, inputs: list[Any], outputs: list[Any]) -> None:
    found: Queue[Any] = Queue()
    client.start_stream(callback=partial(lambda into, result, error: into.put(error or result), found))
    client.async_stream_infer(model, inputs, outputs=outputs)
    answer = found.get(timeout=20)
    client.stop_stream()
    if isinstance(answer, Exception):
        raise answer


def _rows(status: Any) -> list[dict[str, Any]]:
    return list(status.get("regions", {}).values()) if isinstance(status, dict) else status


def main() -> None:
    spec = json.loads(sys.argv[1])
    triton, client = client_of(spec)
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    regions = Regions(client, spec["prefix"])
    found: dict[str, Any] = {"right": {}, "errors": {}}
    try:
        plain = {"as_json": True} if spec["transport"] == "grpc" else {}
        rows = _rows(client.get_system_shared_memory_status(**plain))
        found["status"] = {row["name"]: [row["key"], int(row.get("offset", 0)), int(row["byte_size"])] for row in rows}
        infer = partial(client.infer, spec["model"])
        both = outputs_of(triton, "out_FP32", "out_BYTES")
        answer = infer(inputs_of(triton, regions, shared=True), outputs=both)
        found["right"]["in and out"] = regions.read()
        told = answer.get_response(**plain)["outputs"]
        found["told"] = {row["name"]: row["parameters"] for row in told}
        answer = infer(inputs_of(triton, regions, shared=True))
        found["right"]["in"] = ["sent"] if (answer.as_numpy("out_FP32") == NUMBERS.T).all() else []
        infer(inputs_of(triton, regions, shared=False), outputs=both)
        found["right"]["out"] = regions.read()
        answer = infer(inputs_of(triton, regions, shared=True), outputs=outputs_of(triton, "out_FP32"))
        texts = [t if isinstance(t, bytes) else t.encode() for t in answer.as_numpy("out_BYTES").ravel()]
        found["right"]["first out"] = [*regions.read(), *(["sent"] if texts == list(TEXTS.T.ravel()) else [])]
        answer = infer(inputs_of(triton, regions, shared=True), outputs=outputs_of(triton, "out_BYTES"))
        sent = (answer.as_numpy("out_FP32") == NUMBERS.T).all()
        found["right"]["second out"] = [*regions.read(), *(["sent"] if sent else [])]
        if spec["transport"] == "grpc":
            stream(client, spec["model"], inputs_of(triton, regions, shared=True), both)
            found["right"]["stream"] = regions.read()
        client.unregister_system_shared_memory("in_FP32")
        try:
            infer(inputs_of(triton, regions, shared=True))
        except InferenceServerException as error:
            found["errors"]["unregistered"] = error.message()
        try:
            client.register_cuda_shared_memory("cuda", base64.b64encode(b"handle"), 0, 64)
        except InferenceServerException as error:
            found["errors"]["cuda"] = error.message()
        client.unregister_system_shared_memory()
        found["left"] = len(_rows(client.get_system_shared_memory_status(**plain)))
    finally:
        regions.close()
        client.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
