"""The process that inspects an untrusted model: it limits itself, reads standard input and answers once on standard
output.

Only `inspect.ChildInspector` starts it. The order matters: every limit is set before anything of the model is read, and
the libraries that read it are imported under those limits too.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from typing import Any, Final

from shoal.coordinator.core.graph.rules import Rules
from shoal.host import sandbox
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.migration import LEAST_SAMPLES
from shoal.types.profile import TensorSpec

PROFILE: Final = b"P"
REFUSAL: Final = b"R"
PACK: Final = b"S"


@dataclass(frozen=True, slots=True)
class Tensors:
    """Inputs and outputs of a model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class InspectionRequest:
    """What the child inspects, and under which limits; passed as JSON on its command line."""

    # Digest that the file must have, as "sha256:HEX".
    digest: str
    # Limit of the child's address space, in bytes.
    memory_bytes: int
    # Limit of its processor time, in seconds; rounded down to whole seconds, at least 1.
    cpu_s: float
    # Limit of its wall-clock time, in seconds; the child ends itself about a second later.
    deadline_s: float
    # What a model may contain.
    rules: Rules
    # Tensors of the model that the file's samples are for. None: the file is a model.
    samples_of: Tensors | None = None
    # By input, the shapes that costs are counted at; others are chosen.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Added to the child's nice value.
    niceness: int = 0

    def to_text(self) -> str:
        return json.dumps(asdict(self), default=sorted)

    @classmethod
    def from_text(cls, text: str) -> "InspectionRequest":
        given = json.loads(text)
        rules = {item.name: given["rules"][item.name] for item in fields(Rules)}
        sets = {name: frozenset(value) for name, value in rules.items() if isinstance(value, list)}
        read = {
            "rules": Rules(**{**rules, **sets}),
            "samples_of": _tensors(given["samples_of"]),
            "shapes": {name: tuple(shape) for name, shape in given["shapes"].items()},
        }
        return cls(**{**given, **read})


def _tensors(given: dict[str, list[dict[str, Any]]] | None) -> Tensors | None:
    if given is None:
        return None
    inputs, outputs = (
        tuple(TensorSpec(each["name"], each["dtype"], tuple(each["shape"])) for each in given[side])
        for side in ("inputs", "outputs")
    )
    return Tensors(inputs, outputs)


def main() -> None:
    request = InspectionRequest.from_text(sys.argv[1])
    answers = os.dup(1)
    os.dup2(2, 1)  # so that output of a library does not mix with the answer
    confine(request)
    answer = bytes(inspect(request))
    while answer:
        answer = answer[os.write(answers, answer) :]


def confine(request: InspectionRequest) -> None:
    """Sets limits that the kernel enforces. Where the kernel supports it, the sandbox also cuts off the network and the
    coordinator's keys."""
    os.nice(request.niceness)
    cpu = max(1, int(request.cpu_s))
    for what, soft, hard in (
        (resource.RLIMIT_AS, request.memory_bytes, request.memory_bytes),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_NOFILE, 32, 32),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(what, (soft, hard))
    signal.alarm(max(1, int(request.deadline_s) + 1))
    sandbox.enter(sandbox.runtime())


def inspect(request: InspectionRequest) -> bytes:
    """The serialized answer. Any error that a model causes in our libraries is reported as a fault of the model."""
    from google.protobuf.message import DecodeError  # imported under the limits, like everything that reads the model

    from shoal.wire import nouns

    allowed = f"at most {request.memory_bytes} bytes of address space"
    try:
        answer = _read(request)
        if isinstance(answer, bytes):
            return PACK + answer
        if not isinstance(answer, Refusal):
            return PROFILE + bytes(nouns.to_wire(answer).SerializeToString())
    except DecodeError:  # the scan found it well-formed; the parser reports no memory and invalid text alike
        answer = Refusal(
            Code.MODEL_INVALID,
            "inspection stopped: its parser found text that is not UTF-8, or no memory for what it holds",
            f"UTF-8, and {allowed}",
            "export a plainer model",
        )
    except MemoryError:
        answer = Refusal(
            Code.MODEL_INVALID,
            "inspection stopped: out of memory",
            allowed,
            "export a plainer model; see the limits",
        )
    except Exception as failed:
        answer = Refusal(
            Code.MODEL_INVALID,
            f"{type(failed).__name__}: {failed}"[:400].replace("\0", "?"),
            "a model that can be read",
            "export the model again",
        )
    return REFUSAL + bytes(nouns.to_wire(answer).SerializeToString())


def _read(request: InspectionRequest) -> Any:
    size = os.fstat(0).st_size
    content = os.pread(0, size, 0)
    while len(content) < size and (more := os.pread(0, size - len(content), len(content))):
        content += more
    found = f"sha256:{sha256(content).hexdigest()}"
    if found != request.digest:
        return Refusal(Code.MODEL_DIGEST, found, request.digest, "push again; the file changed after it was verified")
    if request.samples_of is not None:
        return _read_samples(content, request.samples_of)
    from shoal.coordinator.core.graph import profile_of

    return profile_of(content, request.digest, request.rules, request.shapes)


def _read_samples(content: bytes, model: Tensors) -> bytes | Refusal:
    from shoal.artifacts.samples import read_pack

    try:
        pack = read_pack(content, model.inputs, model.outputs)
    except ShoalError as refused:
        return refused.refusal
    if pack.count < LEAST_SAMPLES:
        asked = f"at least {LEAST_SAMPLES}"
        return Refusal(Code.MODEL_INVALID, f"{pack.count} samples", asked, "add some: fewer show nothing")
    return json.dumps({"count": pack.count, "size_bytes": len(content), "answers": bool(pack.answers)}).encode()


if __name__ == "__main__":
    main()
