"""The process that reads a stranger's model: limits itself, reads standard input, answers once on standard output.

Started by `inspect.ChildInspector` only. The order matters: nothing of the model is read before every limit stands, and
the libraries that read it are imported under those limits too.
"""

import json
import os
import resource
import signal
import sys
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any, Final

from shoal.coordinator.core.graph.rules import Rules
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.migration import LEAST_SAMPLES
from shoal.types.profile import TensorSpec
from shoal.wire import sandbox

PROFILE: Final = b"P"
REFUSAL: Final = b"R"
PACK: Final = b"S"


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a model takes and gives."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Errand:
    """What the child is asked: the file's digest, its own limits, the rules for a model; of samples, what they are for
    instead."""

    digest: str
    memory_bytes: int
    cpu_s: float
    deadline_s: float
    rules: Rules
    samples_of: Tensors | None = None

    def to_text(self) -> str:
        return json.dumps(asdict(self), default=sorted)

    @classmethod
    def of_text(cls, text: str) -> "Errand":
        given = json.loads(text)
        rules = {item.name: given["rules"][item.name] for item in fields(Rules)}
        sets = {name: frozenset(value) for name, value in rules.items() if isinstance(value, list)}
        return cls(**{**given, "rules": Rules(**{**rules, **sets}), "samples_of": _tensors(given["samples_of"])})


def _tensors(given: dict[str, list[dict[str, Any]]] | None) -> Tensors | None:
    if given is None:
        return None
    inputs, outputs = (
        tuple(TensorSpec(each["name"], each["dtype"], tuple(each["shape"])) for each in given[side])
        for side in ("inputs", "outputs")
    )
    return Tensors(inputs, outputs)


def main() -> None:
    errand = Errand.of_text(sys.argv[1])
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    confine(errand)
    answer = bytes(inspect(errand))
    while answer:
        answer = answer[os.write(answers, answer) :]


def confine(errand: Errand) -> None:
    """Limits that the kernel keeps; the coordinator's keys and the network are out of reach where it can do that."""
    cpu = max(1, int(errand.cpu_s))
    for what, soft, hard in (
        (resource.RLIMIT_AS, errand.memory_bytes, errand.memory_bytes),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_NOFILE, 32, 32),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(what, (soft, hard))
    signal.alarm(max(1, int(errand.deadline_s) + 1))
    sandbox.enter(sandbox.runtime())


def inspect(errand: Errand) -> bytes:
    """The serialized answer. Whatever a model makes our libraries raise is the model's fault here, and said."""
    from google.protobuf.message import DecodeError  # imported under the limits, like everything that reads the model

    from shoal.wire import nouns

    allowed = f"at most {errand.memory_bytes} bytes of address space"
    try:
        answer: Any = _read(errand)
    except DecodeError:  # the scan found it well formed; the parser does not tell a full memory from a bad text
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
    if isinstance(answer, bytes):
        return PACK + answer
    kind = REFUSAL if isinstance(answer, Refusal) else PROFILE
    return kind + bytes(nouns.to_wire(answer).SerializeToString())


def _read(errand: Errand) -> Any:
    size = os.fstat(0).st_size
    content = os.pread(0, size, 0)
    while len(content) < size and (more := os.pread(0, size - len(content), len(content))):
        content += more
    found = f"sha256:{sha256(content).hexdigest()}"
    if found != errand.digest:
        return Refusal(Code.MODEL_DIGEST, found, errand.digest, "push again; the file changed after it was verified")
    if errand.samples_of is not None:
        return _count(content, errand.samples_of)
    from shoal.coordinator.core.graph import profile_of

    return profile_of(content, errand.digest, errand.rules)


def _count(content: bytes, model: Tensors) -> bytes | Refusal:
    from shoal.wire.samples import read_pack

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
