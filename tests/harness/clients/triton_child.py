"""An unmodified tritonclient in its own process, because its stubs and ours share one proto package.

Usage: python triton_child.py SPEC OUT. SPEC: JSON with transport, url, authority, certificate and key or bearer, and
cases. OUT: a pickle of the results by case: arrays by output, or the error's status and text.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any


def client_of(spec: dict[str, Any]) -> tuple[Any, Any]:
    files: dict[str, Any]
    if spec["transport"] == "grpc":
        from tritonclient import grpc as triton

        files = {
            "root_certificates": spec["authority"],
            "private_key": spec.get("key"),
            "certificate_chain": spec.get("certificate"),
        }
    else:
        from tritonclient import http as triton

        own = {"keyfile": spec["key"], "certfile": spec["certificate"]} if "key" in spec else {}
        files = {"ssl_options": {"ca_certs": spec["authority"], **own}}
    return triton, triton.InferenceServerClient(spec["url"], ssl=True, **files)


def infer(
    triton: Any, client: Any, case: dict[str, Any], arrays: dict[str, Any], said: dict[str, Any]
) -> dict[str, Any]:
    binary = {} if triton.__name__.endswith("grpc") else {"binary_data": case["binary"]}
    inputs = []
    for name, datatype in case["inputs"].items():
        array = arrays[f"{case['name']}/{name}"]
        tensor = triton.InferInput(name, case.get("shape") or list(array.shape), datatype)
        if case.get("shape"):
            _put_raw(tensor, array.tobytes())
        else:
            tensor.set_data_from_numpy(array, **binary)
        inputs.append(tensor)
    outputs = [triton.InferRequestedOutput(name, **binary) for name in case["outputs"]] or None
    options = {**said, **case.get("options", {})}
    result = client.infer(case["model"], inputs, outputs=outputs, request_id=case["name"], **options)
    answer = result.get_response()
    assert (answer["id"] if isinstance(answer, dict) else answer.id) == case["name"]
    assert (answer["model_version"] if isinstance(answer, dict) else answer.model_version) == "1"
    names = case["outputs"] or [o["name"] if isinstance(o, dict) else o.name for o in _outputs(answer)]
    return {name: result.as_numpy(name) for name in names}


def _put_raw(tensor: Any, raw: bytes) -> None:
    """Bypass the client's own size checks."""
    if hasattr(tensor, "_raw_content"):
        tensor._raw_content = raw
    else:
        tensor._raw_data = raw
        tensor._parameters["binary_data_size"] = len(raw)


def _outputs(said: Any) -> Any:
    return said["outputs"] if isinstance(said, dict) else said.outputs


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    arrays = pickle.loads(Path(spec["arrays"]).read_bytes())
    triton, client = client_of(spec)

    def call_options() -> dict[str, Any]:
        """A new dictionary per call, because the HTTP client modifies the one that it is given."""
        return {"headers": {"authorization": f"Bearer {spec['bearer']}"}} if "bearer" in spec else {}

    errors = __import__("tritonclient.utils").utils.InferenceServerException
    found: dict[str, Any] = {
        "live": client.is_server_live(**call_options()),
        "ready": client.is_server_ready(**call_options()),
        "server": _plain(client.get_server_metadata(**call_options())),
        "index": _plain(client.get_model_repository_index(**call_options())),
        "models": {},
        "configs": {},
        "unknown": {model: client.is_model_ready(model, **call_options()) for model in spec["unknown"]},
        "answers": {},
        "errors": {},
    }
    for model in spec["models"]:
        found["models"][model] = (
            client.is_model_ready(model, **call_options()),
            _plain(client.get_model_metadata(model, **call_options())),
        )
        found["configs"][model] = _plain(client.get_model_config(model, **call_options()))
    for case in spec["cases"]:
        try:
            found["answers"][case["name"]] = infer(triton, client, case, arrays, call_options())
        except errors as error:
            found["errors"][case["name"]] = (str(error.status()), error.message())
    found["statistics"] = {
        model: _plain(client.get_inference_statistics(model, **call_options()))["model_stats"]
        for model in spec["models"]
    }
    for model in spec["unknown"]:
        try:
            client.get_model_metadata(model, **call_options())
        except errors as error:
            found["errors"][f"metadata {model}"] = (str(error.status()), error.message())
    client.close()
    Path(sys.argv[2]).write_bytes(pickle.dumps(found))


def _plain(said: Any) -> Any:
    """A message as the HTTP client returns it: plain dictionaries."""
    if isinstance(said, dict | list):
        return said
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(said, preserving_proto_field_name=True)


if __name__ == "__main__":
    main()
