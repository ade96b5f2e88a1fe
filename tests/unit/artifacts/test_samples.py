"""A pack of samples: what numpy writes is read, what a stranger makes of it is refused."""

import io
import struct
import zipfile
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.artifacts.samples import read_pack, write_pack
from shoal.types.codes import Code, ShoalError
from shoal.types.migration import PACK_BYTES
from shoal.types.profile import TensorSpec

X, N, TEXT = TensorSpec("x", "FP32", (-1, 3)), TensorSpec("n", "INT64", ()), TensorSpec("t", "BYTES", (2,))
Y = TensorSpec("y", "FP32", (-1, 2))


def pack(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def raw(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def header(shape: str, dtype: str = "<f4", version: bytes = b"\x01\x00") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text


def test_each_slice_is_a_sample_and_an_open_first_axis_is_cut() -> None:
    x, n = np.arange(12, dtype=np.float32).reshape(2, 2, 3), np.array([5, 6])
    found = read_pack(pack(x=x, n=n, t=np.array([["a", "ß"], ["", "c"]])), (X, N, TEXT), (Y,))
    inputs, answers = found.sample(1)
    assert np.array_equal(inputs["x"], x[1])
    assert (inputs["n"].shape, int(inputs["n"]), list(inputs["t"]), answers) == ((), 6, ["", "c"], {})
    cut = read_pack(pack(x=x[0]), (X,), (Y,))
    assert (cut.count, cut.sample(0)[0]["x"].shape) == (2, (1, 3))
    with pytest.raises(IndexError):
        found.sample(2)


def test_answers_come_with_it_where_all_of_them_do() -> None:
    found = read_pack(pack(x=np.zeros((4, 1, 3), np.float32), y=np.ones((4, 1, 2), np.float32)), (X,), (Y,))
    assert found.sample(3)[1]["y"].tolist() == [[1, 1]]


def test_what_is_written_is_read_and_the_same_again() -> None:
    texts = np.array(["ß", ""], np.object_)
    samples = [
        ({"x": np.full((1, 3), at, np.float32), "n": np.int64(at) * np.ones((), np.int64), "t": texts},
         {"y": np.full((1, 2), np.nan, np.float32)})
        for at in range(8)
    ]  # fmt: skip
    content = write_pack(samples, (X, N, TEXT), (Y,))
    assert content == write_pack(samples, (X, N, TEXT), (Y,))
    found = read_pack(content, (X, N, TEXT), (Y,))
    inputs, answers = found.sample(5)
    assert (found.count, inputs["x"].tolist(), int(inputs["n"]), list(inputs["t"])) == (8, [[5.0] * 3], 5, ["ß", ""])
    assert np.isnan(answers["y"]).all()


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        (X, [np.zeros((1, 3), np.float32), np.zeros((2, 3), np.float32)]),
        (TEXT, [np.array(["a\0", "b"], np.object_)] * 2),
        (TEXT, [np.array([b"\xff", "b"], np.object_)] * 2),
        (TensorSpec("h", "BF16", (1,)), [np.zeros(1, ml_dtypes.bfloat16)] * 2),
        (X, [np.zeros((PACK_BYTES // 12, 3), np.float32)] * 2),
    ],
)
def test_what_no_pack_can_hold_is_not_written(spec: TensorSpec, values: list[Any]) -> None:
    with pytest.raises(ShoalError) as caught:
        write_pack([({spec.name: value}, {}) for value in values], (spec,), ())
    assert caught.value.code is Code.MODEL_INVALID


@pytest.mark.parametrize(
    "data",
    [
        b"", b"PK\x03\x04", raw({}), pack(x=np.zeros((2, 1, 3))), pack(x=np.zeros((2, 1, 4), np.float32)),
        pack(x=np.zeros((0, 1, 3), np.float32)), pack(z=np.zeros(3)), pack(x=np.array([{}, {}], dtype=object)),
        pack(x=np.zeros(3, np.float32)), raw({"x.npy": b"\x80\x04N."}), raw({"x.npy": header("(2, 1, 3)")}),
        raw({"x.npy": header("(2, 1, 3)") + bytes(1000)}), raw({"x.npy": header(f"({2**40}, 1, 3)")}),
        raw({"x.npy": header("(-1, 1, 3)")}), raw({"x.npy": header("(2, 1, 3)", "|O")}),
        raw({"x.npy": header("(2, 1, 3)", version=b"\x09\x00")}), raw({"../x.npy": header("(2, 1, 3)") + bytes(24)}),
        raw({"x.npy": header(f"({PACK_BYTES}, 1, 3)") + bytes(PACK_BYTES)}),
        raw({"x.npy": header("(2, 1, 3)", "[('a', '<f4')]")}), bytes(PACK_BYTES + 1),
        raw({"x.npy": header(f"({2**40}, 1, 3)", "<U0")}),
    ],
)  # fmt: skip
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ShoalError) as caught:
        read_pack(data, (X,), (Y,))
    assert caught.value.code is Code.MODEL_INVALID


def many(count: int) -> bytes:
    """A file whose directory has so many entries, whatever its end record says of their number."""
    directory = (b"PK\x01\x02" + bytes(42)) * count
    return directory + b"PK\x05\x06" + bytes(4) + b"\x01\0\x01\0" + struct.pack("<LLH", len(directory), 0, 0)


def beyond_64(data: bytes) -> bytes:
    """With the locator of a second end record before the first."""
    return data[:-22] + b"PK\x06\x07" + bytes(16) + data[-22:]


def broken_lzma() -> bytes:
    data = bytearray(raw({"x.npy": header("(2, 1, 3)") + bytes(24)}, zipfile.ZIP_LZMA))
    for at in range(len("x.npy") + 30 + 4, len("x.npy") + 30 + 12):
        data[at] = 0xFF
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        raw({"x.npy": header("(((")}), raw({"x.npy": header(f"(0, {10**30})")}), raw({"x.npy": header("-" * 9_000)}),
        raw({"x.npy": header("(2, 1, 3)").replace(b"'<f4'", b"()   ")}),
        raw({"x.npy": header("(2, 1, 3)").replace(b"'<f4'", b"[()] ")}),
        *(raw({"x.npy": header("(2, 1, 3)") + bytes(24)}, other) for other in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2)),
        broken_lzma(), many(257), beyond_64(raw({"x.npy": header("(2, 1, 3)") + bytes(24)})),
        raw({"x.npy": header("(2, 1, 3)") + bytes(24)}) + bytes(7), b"PK\x05\x06" + bytes(8) + b"\xff" * 8 + bytes(2),
    ],
)  # fmt: skip
def test_what_is_made_to_break_the_reader_is_refused(data: bytes) -> None:
    with pytest.raises(ShoalError) as caught:
        read_pack(data, (X,), (Y,))
    assert caught.value.code is Code.MODEL_INVALID


def test_the_directory_of_a_file_is_not_read_before_its_entries_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zipfile.ZipFile", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ShoalError) as caught:
        read_pack(many(1_400_000), (X,), (Y,))
    assert caught.value.code is Code.MODEL_INVALID


GOOD = raw({"x.npy": header("(2, 1, 3)") + bytes(24)})


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4), st.integers(0, len(GOOD)))
def test_bytes_flipped_or_cut_off_give_a_refusal_or_samples(flips: list[tuple[int, int]], kept: int) -> None:
    data = bytearray(GOOD)
    for at, value in flips:
        data[at] = value
    for content in (bytes(data), GOOD[:kept]):
        with suppress(ShoalError):
            assert read_pack(content, (X,), (Y,)).sample(0)[0]["x"].shape[1:] == (3,)
