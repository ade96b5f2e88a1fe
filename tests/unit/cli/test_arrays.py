"""Arrays of `shoal infer`: strings, BF16 and what cannot be carried, in and out."""

import errno
import json
from pathlib import Path

import click
import ml_dtypes
import numpy as np
import pytest

from shoal.cli.arrays import RequestInputs, match_inputs, read_inputs, save_outputs, to_json_value
from shoal.cli.commands.infer import preview
from shoal.cli.options import TENSOR_SHAPE
from shoal.client.inference import _outputs, _refusal
from shoal.client.tensors import ModelMetadata, TensorSpec, bfloat16, float32
from shoal.types.codes import Code, Refusal, ShoalError


@pytest.mark.parametrize(
    ("items", "kind"), [(["a", "", "ß x"], "U"), ([b"\xff\xfe", b"a"], "S"), ([b"text", b""], "U")]
)
def test_strings_are_saved_as_numpy_reads_them_without_unpickling(
    tmp_path: Path, items: list[str | bytes], kind: str
) -> None:
    value = np.empty(len(items), np.object_)
    value[:] = items
    save_outputs(tmp_path / "y.npz", {"y": value.reshape(1, -1), "n": np.arange(3)})
    with np.load(tmp_path / "y.npz", allow_pickle=False) as found:
        assert found["y"].dtype.kind == kind
        assert found["y"].shape == (1, len(items))
        as_bytes = [item if isinstance(item, bytes) else item.encode() for item in found["y"].ravel().tolist()]
        assert as_bytes == [item if isinstance(item, bytes) else item.encode() for item in items]
        assert found["n"].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["y.npz"]


def test_what_a_file_cannot_hold_leaves_no_file(tmp_path: Path) -> None:
    value = np.empty(2, np.object_)
    value[:] = [b"ends in\0", b""]
    with pytest.raises(ShoalError) as caught:
        save_outputs(tmp_path / "y.npz", {"y": value})
    assert caught.value.code is Code.INVALID_ARGUMENT
    value[:] = [b"x" * 40_000_000, b""]
    with pytest.raises(ShoalError) as caught:
        save_outputs(tmp_path / "y.npz", {"y": value})
    assert caught.value.code is Code.TOO_LARGE
    with pytest.raises(ShoalError) as caught:
        save_outputs(tmp_path / "absent" / "y.npz", {"y": np.zeros(1)})
    assert caught.value.code is Code.SOURCE_UNREACHABLE
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_from_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, both were DISK_FULL."""

    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", fill)
    with pytest.raises(ShoalError) as caught:
        save_outputs(tmp_path / "y.npz", {"y": np.zeros(1)})
    assert caught.value.code is Code.DISK_FULL
    assert not list(tmp_path.iterdir())


def test_objects_are_refused_by_a_code_and_told_how_strings_are_written(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.array(["a", [1]], dtype=object))
    with pytest.raises(ShoalError) as caught:
        read_inputs(tmp_path / "x.npz")
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert "dtype=str" in caught.value.refusal.remedy
    ragged = {"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [[1, 2], [3]]}]}
    (tmp_path / "x.json").write_text(json.dumps(ragged))
    with pytest.raises(ShoalError) as caught:
        read_inputs(tmp_path / "x.json")
    assert caught.value.code is Code.INVALID_ARGUMENT
    with pytest.raises(ShoalError) as caught:
        read_inputs(tmp_path / "absent.npz")
    assert caught.value.code is Code.SOURCE_UNREACHABLE


def test_a_request_in_json_keeps_its_datatypes_and_parameters(tmp_path: Path) -> None:
    request = {
        "inputs": [
            {"name": "b", "shape": [2], "datatype": "BF16", "data": [1.5, -2.0]},
            {"name": "s", "shape": [1, 1], "datatype": "BYTES", "data": [["a"]]},
        ],
        "parameters": {"sequence_id": 7, "sequence_start": True},
    }
    (tmp_path / "x.json").write_text(json.dumps(request))
    given = read_inputs(tmp_path / "x.json")
    assert given.datatypes == {"b": "BF16", "s": "BYTES"}
    assert given.parameters == {"sequence_id": 7, "sequence_start": True}
    assert given.arrays["b"].tolist() == [1.5, -2.0]
    assert given.arrays["s"].shape == (1, 1)


def test_an_unnamed_array_is_the_only_input_or_the_one_without_a_name() -> None:
    array = np.zeros((1, 2), np.float32)
    x, y, unnamed = (TensorSpec(name, "FP32", (1, 2)) for name in ("x", "y", ""))

    def names(*inputs: TensorSpec) -> list[str]:
        return list(match_inputs(RequestInputs({"": array}), "model", ModelMetadata(inputs, ()))[0])

    assert names(x) == ["x"]
    assert names(unnamed, x) == [""]
    with pytest.raises(ShoalError, match="2 inputs: x, y") as refused:
        names(x, y)
    assert refused.value.code is Code.INVALID_ARGUMENT


def test_bf16_goes_in_by_its_bits_or_exactly_and_comes_out_exactly() -> None:
    values = np.array([[1.5, -0.0, float("inf")], [3.140625, 2.0**-130, -7.0]], np.float32)
    bits = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    for given in (values, bits, bits.view("V2"), values.astype(ml_dtypes.bfloat16), values.astype(np.float64)):
        assert np.array_equal(bfloat16(given, "x"), bits), given.dtype
    assert np.isnan(float32(bfloat16(np.array([np.nan], np.float32), "x")))[0]
    for inexact in (np.array([0.1], np.float32), np.array([2**40 + 1], np.int64), np.array([1e300]), np.array(["a"])):
        with pytest.raises(ShoalError) as caught:
            bfloat16(inexact, "x")
        assert caught.value.code is Code.INVALID_ARGUMENT
    head = {"outputs": [{"name": "y", "shape": [2, 3], "datatype": "BF16", "parameters": {"binary_data_size": 12}}]}
    text = json.dumps(head).encode()
    outputs, datatypes = _outputs({"inference-header-content-length": str(len(text))}, text + bits.tobytes())
    assert datatypes == {"y": "BF16"}
    assert np.array_equal(outputs["y"], values)


def test_what_is_no_text_is_shown_with_escapes() -> None:
    value = np.empty((1, 2), np.object_)
    value[0] = [b"a\xff", "ß"]
    assert to_json_value(value) == [["a\\xff", "ß"]]
    assert to_json_value(np.eye(2, dtype=np.int8)) == [[1, 0], [0, 1]]


def test_a_refusal_of_the_gateway_is_read_back() -> None:
    refusal = Refusal(Code.MODEL_NOT_READY, "default/x has no replica", "a ready replica", "retry later")
    body = json.dumps({"error": str(refusal), "code": refusal.code}).encode()
    assert _refusal(503, {"shoal-code": "MODEL_NOT_READY"}, body) == refusal
    assert _refusal(502, {}, b"bad gateway") == Refusal(Code.INTERNAL, "HTTP 502: bad gateway")


def test_a_preview_is_one_line() -> None:
    assert "\n" not in preview(
        np.array([-1.16622e-2, 1.08268e-1, -4.22189e-2, 3.71609e-3, -2.14613e-6, 6.9e-2], np.float32)
    )
    assert preview(np.arange(9)) == "[0 1 2 3 4 5]"


def test_a_shape_is_typed_as_it_is_printed() -> None:
    assert TENSOR_SHAPE.convert("x=1x3x?x320", None, None) == ("x", (1, 3, -1, 320))
    for wrong in ("x", "x=", "=1", "x=1x", "x=-1", "x=1x3.5", "x=99999999999"):
        with pytest.raises(click.UsageError):
            TENSOR_SHAPE.convert(wrong, None, None)
