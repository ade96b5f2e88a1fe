"""Arrays between files and requests or answers."""

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.client.tensors import BF16, DTYPES, ModelMetadata
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import PACK_BYTES

Array = NDArray[Any]

_NUL: Final = "\0"
"""numpy pads strings with these to the length of the longest, and cannot tell padding from content."""


@dataclass(frozen=True, slots=True)
class RequestInputs:
    """What a request file contains."""

    # By input name; a single unnamed array is under the empty name.
    arrays: dict[str, Array]
    # By input name, if the file states them: a JSON request does.
    datatypes: dict[str, str] = field(default_factory=dict)
    # Of the request.
    parameters: dict[str, str | int | bool] = field(default_factory=dict)


def read_inputs(path: Path) -> RequestInputs:
    """Read .npz, .npy, or a protocol request as .json. Raises ShoalError(SOURCE_UNREACHABLE | INVALID_ARGUMENT)."""
    wanted = "a readable .npz, .npy or .json"
    try:
        match path.suffix:
            case ".npz":
                with np.load(path, allow_pickle=False) as arrays:
                    return RequestInputs(dict(arrays))
            case ".npy":
                return RequestInputs({"": np.load(path, allow_pickle=False)})
            case ".json":
                return _parse_request(json.loads(path.read_text()))
            case _:
                raise refuse(Code.SOURCE_UNREACHABLE, f"{path}", wanted, "correct the file")
    except OSError as cause:
        raise refuse(Code.SOURCE_UNREACHABLE, f"{path}: {cause.strerror}", wanted, "correct the path") from cause
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        asked = "arrays of numbers, or of text (numpy's str or bytes)"
        remedy = (
            "nothing is unpickled: write lists of strings as numpy.array(texts, dtype=str), each tensor as one array"
        )
        raise refuse(Code.INVALID_ARGUMENT, f"{path}: {type(cause).__name__}: {cause!s:.200}", asked, remedy) from cause


def match_inputs(
    given: RequestInputs, workload: str, metadata: ModelMetadata
) -> tuple[dict[str, Array], dict[str, str]]:
    """Arrays and datatypes by input, of a file that does not state the datatypes. Raises
    ShoalError(INVALID_ARGUMENT)."""
    declared = {each.name: each.datatype for each in metadata.inputs}
    if "" not in given.arrays or "" in declared:
        return given.arrays, declared
    if len(declared) != 1:
        found = f"{workload} has {len(declared)} inputs: {', '.join(declared)!s:.200}"
        raise refuse(Code.INVALID_ARGUMENT, found, "the one input that an .npy file is for", "write an .npz")
    return {next(iter(declared)): given.arrays[""]}, declared


def _parse_request(request: Any) -> RequestInputs:
    arrays, datatypes = dict[str, Array](), dict[str, str]()
    for tensor in request["inputs"]:
        name, datatype = tensor["name"], tensor["datatype"]
        kind = np.float32 if datatype == BF16 else DTYPES.get(datatype, object)
        arrays[name] = np.array(tensor["data"], kind).reshape(tensor["shape"])
        datatypes[name] = datatype
    parameters = {name: value for name, value in request.get("parameters", {}).items() if name != "binary_data_output"}
    return RequestInputs(arrays, datatypes, parameters)


def save_outputs(path: Path, outputs: Mapping[str, Array]) -> None:
    """Write a file that numpy.load reads without unpickling: text as str, other bytes as bytes.

    The file is complete or absent. Raises ShoalError(INVALID_ARGUMENT | TOO_LARGE | DISK_FULL |
    SOURCE_UNREACHABLE).
    """
    arrays = {name: _to_storable(name, value) for name, value in outputs.items()}
    beside = path.with_name(f".{path.name}.part")
    try:
        try:
            with beside.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as cause:
        raise ShoalError(
            Refusal(
                Code.DISK_FULL if cause.errno in (errno.ENOSPC, errno.EDQUOT) else Code.SOURCE_UNREACHABLE,
                f"{path}: {cause.strerror}",
                "a place to write to",
                "choose another --save",
            )
        ) from cause


def _to_storable(name: str, value: Array) -> Array:
    if value.dtype != np.object_:
        return value
    items = [item if isinstance(item, bytes) else str(item).encode() for item in value.ravel()]
    longest = max(map(len, items), default=0)
    if 4 * longest * len(items) > PACK_BYTES:
        found = f"output {name!r:.80}: {len(items)} strings, the longest of {longest} bytes"
        raise refuse(Code.TOO_LARGE, found, f"at most {PACK_BYTES} bytes as numpy keeps them", "take it as -o json")
    if any(item.endswith(_NUL.encode()) for item in items):
        found = f"output {name!r:.80} has a string that ends in NUL"
        raise refuse(Code.INVALID_ARGUMENT, found, "strings that numpy can keep", "take it as -o json")
    try:
        return np.array([item.decode() for item in items], np.str_).reshape(value.shape)
    except UnicodeDecodeError:
        return np.array(items, np.bytes_).reshape(value.shape)


def to_json_value(value: Array) -> Any:
    """Nested lists; bytes become text, with escapes for what is not UTF-8."""
    if value.dtype != np.object_:
        return value.tolist()
    texts = [item.decode(errors="backslashreplace") if isinstance(item, bytes) else str(item) for item in value.ravel()]
    made: Array = np.empty(len(texts), np.object_)
    made[:] = texts
    return made.reshape(value.shape).tolist()
