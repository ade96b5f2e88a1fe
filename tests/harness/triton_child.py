"""An unmodified tritonclient, in a process of its own (its stubs and ours are of one proto package).

Usage: python triton_child.py SPEC OUT. SPEC: JSON with transport, url, authority, certificate and key or bearer, and
cases; OUT: a pickle of what came back, by case: arrays by output, or the error's status and text.
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
    names = case["outputs"] or [o["name"] if isinstance(o, dict) else o.name for o in _outputs(answer)]
    return {name: result.as_numpy(name) for name in names}


def _put_raw(tensor: Any, raw: bytes) -> None:
    """Past the client's own checks of size."""
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

    def said() -> dict[str, Any]:
        """New ones for each call: the HTTP client adds its own to those that it is given."""
        return {"headers": {"authorization": f"Bearer {spec['bearer']}"}} if "bearer" in spec else {}

    errors = __import__("tritonclient.utils").utils.InferenceServerException
    found: dict[str, Any] = {
        "live": client.is_server_live(**said()),
        "ready": client.is_server_ready(**said()),
        "server": _plain(client.get_server_metadata(**said())),
        "index": _plain(client.get_model_repository_index(**said())),
        "models": {},
        "answers": {},
        "errors": {},
    }
    for model in spec["models"]:
        found["models"][model] = (
            client.is_model_ready(model, **said()),
            _plain(client.get_model_metadata(model, **said())),
        )
    for case in spec["cases"]:
        try:
            found["answers"][case["name"]] = infer(triton, client, case, arrays, said())
        except errors as error:
            found["errors"][case["name"]] = (str(error.status()), error.message())
    for model in spec["unknown"]:
        try:
            client.get_model_metadata(model, **said())
        except errors as error:
            found["errors"][f"metadata {model}"] = (str(error.status()), error.message())
    client.close()
    Path(sys.argv[2]).write_bytes(pickle.dumps(found))


def _plain(said: Any) -> Any:
    """A message as the HTTP client gives it: plain dictionaries."""
    if isinstance(said, dict | list):
        return said
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(said, preserving_proto_field_name=True)


if __name__ == "__main__":
    main()
