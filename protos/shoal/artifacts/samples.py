"""A workload's own inputs for verification, and their expected answers if it has any, from an untrusted .npz file.

The file has one array for each input of the model, and one for each output or for none. An array's first axis counts
the samples. An array with one axis more than the model's tensor holds a sample in each slice. Otherwise the model's own
first axis, which must be dynamic or 1, is cut into samples of size 1. Nothing is unpickled. Every size is computed from
a header before anything of that size is allocated. The coordinator's inspection and the workers read it; both have
numpy. `zipfile` and its decompressors, 1 MiB, are imported with the first pack: most workers are told of none.
"""

import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.migration import PACK_BYTES
from shoal.types.profile import TensorSpec

if TYPE_CHECKING:
    from zipfile import ZipFile, ZipInfo

Array = NDArray[Any]

MAX_ARRAYS: Final = 256
_STRING_BYTES: Final = 64
"""What one string costs as an object, however short it is."""
_ENDING: Final = ".npy"
_DTYPES: Final = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32,
    "FP64": np.float64, "BYTES": np.object_,
}  # fmt: skip
"""By the protocol's name; numpy's files cannot hold the other types."""
_END: Final = struct.Struct("<4s8xL4xH")
"""A zip file's end record: its signature, the size of the directory before it, the size of the comment after it."""
_HEADERS: Final = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True, slots=True)
class SamplePack:
    """Arrays whose first axis counts the samples."""

    # Number of samples.
    count: int
    # By input name.
    inputs: Mapping[str, Array]
    # By output name; empty where the pack has no answers.
    answers: Mapping[str, Array]

    def sample(self, index: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """(inputs, answers) of one sample. Raises IndexError."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {name: a[index] for name, a in self.inputs.items()}, {name: a[index] for name, a in self.answers.items()}


def read_pack(data: bytes, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> SamplePack:
    """The pack in `data`, checked against the model's inputs and outputs. Raises ShoalError(MODEL_INVALID)."""
    from zipfile import ZipFile

    specs = {spec.name: spec for spec in (*outputs, *inputs)}
    if len(data) > PACK_BYTES:
        raise _invalid(f"{len(data)} bytes", f"at most {PACK_BYTES}")
    arrays: dict[str, Array] = {}
    left = PACK_BYTES
    try:
        if (listed := _count_entries(data)) > MAX_ARRAYS:
            raise _invalid(f"{listed} arrays", f"at most {MAX_ARRAYS}")
        with ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(_ENDING)
                if name not in specs or name in arrays or not member.filename.endswith(_ENDING):
                    raise _invalid(f"{member.filename!r:.80}", f"one array for each of {', '.join(specs)!s:.200}")
                found = _array(archive, member, left)
                left -= found.nbytes
                arrays[name] = _by_sample(specs[name], found)
    except ShoalError:
        raise
    except Exception as error:  # zipfile, its decompressors and numpy's parser document no full list of errors
        raise _invalid(f"{type(error).__name__}: {error}"[:200], "an .npz file as numpy.savez writes it") from error
    missing = [spec.name for spec in inputs if spec.name not in arrays]
    answers = {spec.name: arrays[spec.name] for spec in outputs if spec.name in arrays}
    if missing or (answers and len(answers) < len(outputs)):
        raise _invalid(f"arrays of {', '.join(arrays)!s:.200}", "every input, and every output or none")
    counts = {len(array) for array in arrays.values()}
    if len(counts) != 1 or counts == {0}:
        raise _invalid(f"{sorted(counts)} samples", "as many of each, at least one")
    return SamplePack(counts.pop(), {spec.name: arrays[spec.name] for spec in inputs}, answers)


def write_pack(
    samples: Sequence[tuple[Mapping[str, Array], Mapping[str, Array]]],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> bytes:
    """An .npz file of (inputs, answers) of each sample, in the form that `read_pack` reads. Equal samples give equal
    bytes.

    Raises ShoalError(MODEL_INVALID) for shapes that differ between samples, for more than a file may hold, and for
    content that no file can hold.
    """
    from zipfile import ZipFile

    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        for side, specs in enumerate((inputs, outputs)):
            for spec in specs:
                array = _column(spec.name, [sample[side][spec.name] for sample in samples])
                with archive.open(spec.name + _ENDING, "w") as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    content = file.getvalue()
    read_pack(content, inputs, outputs)
    return content


def _column(name: str, values: Sequence[Array]) -> Array:
    shapes = sorted({value.shape for value in values})
    if len(shapes) != 1:
        raise _invalid(f"{name!r:.80} in shapes {shapes!s:.80}", "one shape")
    found: Array = np.stack(values)
    if found.dtype != np.object_:
        return found
    texts = np.array([text if isinstance(text, str) else "" for text in found.flat], np.str_).reshape(found.shape)
    if not np.array_equal(texts.astype(np.object_), found):
        raise _invalid(f"{name!r:.80} holds bytes that are no text, or end in NUL", "text")
    return texts


def _count_entries(data: bytes) -> int:
    """Upper bound on the entries of the zip directory, because zipfile makes an object of each when it opens a file.
    Counts the signatures that entries begin with, because the count in the end record may be false. Raises
    ValueError."""
    end = len(data) - _END.size
    mark, size, comment = _END.unpack_from(data, end) if end >= 0 else (b"", 0, 0)
    if mark != b"PK\x05\x06" or comment or size > end or data.startswith(b"PK\x06\x07", max(end - 20, 0)):
        raise ValueError("no plain end record")
    return data.count(b"PK\x01\x02", end - size, end)


def _array(archive: "ZipFile", member: "ZipInfo", left: int) -> Array:
    from zipfile import ZIP_DEFLATED, ZIP_STORED

    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise ValueError("a compression that numpy does not write")
    with archive.open(member) as file:
        read_header = _HEADERS.get(np.lib.format.read_magic(file))
        if read_header is None:
            raise ValueError("an array of a version that is not read")
        shape, fortran, dtype = read_header(file, max_header_size=10_000)
        if dtype.hasobject or dtype.names is not None:
            raise ValueError(f"an array of {dtype!s:.40}")
        count = 1
        for axis in shape:
            count *= axis
        size = count * dtype.itemsize
        taken = count * max(dtype.itemsize, _STRING_BYTES if dtype.kind in "US" else 1)
        if count < 0 or taken > left:
            raise ValueError(f"{member.filename!r:.80} of {size} bytes, {left} are left")
        content = file.read(size + 1)
        if len(content) != size:
            raise ValueError(f"{member.filename!r:.80} holds {len(content)} bytes or more, its header says {size}")
    flat = np.frombuffer(content, dtype=dtype) if size else np.zeros(count, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def _by_sample(spec: TensorSpec, found: Array) -> Array:
    wanted = _DTYPES.get(spec.dtype)
    if wanted is np.object_ and found.dtype.kind in "US":
        found = (
            np.char.decode(found, "utf-8").astype(np.object_) if found.dtype.kind == "S" else found.astype(np.object_)
        )
    elif wanted is None or found.dtype != wanted:
        raise ValueError(f"{spec.name!r:.80} of {found.dtype}, the model takes {spec.dtype}")
    if found.ndim == len(spec.shape) + 1:
        shape = found.shape[1:]
    elif found.ndim == len(spec.shape) and spec.shape and spec.shape[0] in (-1, 1):
        found = found[:, None]
        shape = found.shape[1:]
    else:
        raise ValueError(f"{spec.name!r:.80} with {found.ndim} axes, the model's has {len(spec.shape)}")
    if any(asked not in (-1, is_) for asked, is_ in zip(spec.shape, shape, strict=True)):
        raise ValueError(f"{spec.name!r:.80} in samples of {list(shape)}, the model takes {list(spec.shape)}")
    return found


def _invalid(found: str, asked: str) -> ShoalError:
    return refuse(Code.MODEL_INVALID, f"samples: {found}", asked, "write them with numpy.savez")
