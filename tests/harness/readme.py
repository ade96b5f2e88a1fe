"""README.md's ten minutes, as a person types them: one command after another into one shell; what each must print."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from harness.triton import in_process
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.client import Contexts
from shoal.devstack import ocr
from shoal.devstack.load import Load

ROOT: Final = Path(__file__).parents[2]
SECTION: Final = "Ten minutes of use"
PROCESSES, CONTAINERS = "shoal dev up", "docker compose up"
"""In the block that starts the regions of the one kind, or of the other."""
MOVES: Final = "shoal migrate"
"""In the block of moves."""
ENOUGH: Final = 10
"""Answers of the load before the first move and after the last."""
_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANSWER: Final = r"softmax_11.tmp_0\s+float32\s+1x40x6625"
_READY: Final = r"^ready$"
_DIGEST: Final = r"sha256:[0-9a-f]{64}"

PRINTED: Final[Mapping[str, tuple[str, ...]]] = {
    ". .venv/bin/activate": (),
    "shoal dev up": (r"^up: region home with 4 agents on grpc links, 2 regions",),
    "shoal get nodes": (r"^edge-npu +agent +ready", r"gateway +gateway +ready"),
    "shoal get devices -o wide": (r"^edge-npu/qualcomm-ai100-dm2 \(emulated\) .*\(profile\)",),
    "M=": (),
    "shoal model push": (rf"^ppocr-rec +{_DIGEST}$",),
    "shoal model inspect": (rf"^ppocr-rec +{_DIGEST}$", r"^in +x +FP32 +\?x3x\?x\?$"),
    "shoal validate": (r"^valid: 1 file$",),
    "shoal plan": (r"^CHOSEN +edge-npu/", r"^plan [0-9a-f]{16}$"),
    "shoal apply -f examples/reader.yaml": (r"^CHOSEN +edge-npu/", _READY),
    "shoal explain reader": (r"^default/reader is ready, 1 of 1 ready$", r"^default/reader +edge-npu/"),
    "shoal get placements": (r"^default/reader +edge-npu/.* ready +yes",),
    "python -c": (),
    "shoal infer reader": (_ANSWER,),
    "export GATEWAY=": (),
    "shoal drain": (r"^edge-npu is cordoned", r"default/reader +edge-npu/\S+ -> \S+ +done"),
    "shoal uncordon": (r"^edge-npu takes work again$",),
    "shoal can-move": (r"^yes: default/reader to edge-npu",),
    "shoal migrate": (r"default/reader +\S+ -> edge-npu/\S+ +done", r"^verified against source .*: passed$"),
    "shoal get migrations": (r"default/reader .* done .* drain ", r"default/reader .* done .* operator "),
    "shoal apply -f examples/archive.yaml": (r"not placed: COST_OVER ", _READY),
    "shoal get agreements": (r" origin +\S+ +default/archive +active +ready ",),
    "shoal infer archive": (_ANSWER,),
    "shoal apply -f examples/sturdy.yaml": (r"^default/reader +2 of 2 placed", _READY),
    "shoal doctor": (r"^\d+ passed, 0 failed$",),
    "import os": (r"^softmax_11.tmp_0 \(1, 40, 6625\) True$",),
}
"""What each command prints, by how it begins."""


@dataclass(frozen=True, slots=True)
class Block:
    """What is typed together. language: sh, or python."""

    language: str
    text: str

    @property
    def commands(self) -> tuple[str, ...]:
        return (self.text,) if self.language == "python" else tuple(self.text.splitlines())


def ten_minutes() -> tuple[Block, ...]:
    """What the section has to type, in order; the two starts are its first blocks."""
    _, _, after = (ROOT / "README.md").read_text().partition(f"\n## {SECTION}\n")
    found = (Block(*match.groups()) for match in _BLOCK.finditer(after.partition("\n## ")[0]))
    return tuple(block for block in found if block.language in ("sh", "python"))


class Terminal:
    """A shell that stays, in a folder that has what the README uses of the repository's root."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "examples").symlink_to(ROOT / "examples")
        self._bash = subprocess.Popen(
            ["bash"], cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def type(self, command: str, timeout_s: float = 150.0) -> str:
        """What it prints. An assertion fails where its status is not 0, or it takes longer than that."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        end = "this was it:"
        late = threading.Timer(timeout_s, self._bash.kill)
        late.start()
        try:
            self._bash.stdin.write(f"{{ {command}\n}} </dev/null; echo; echo '{end}' $?\n")
            self._bash.stdin.flush()
            printed = list[str]()
            for line in self._bash.stdout:
                if line.startswith(end):
                    break
                printed.append(line.rstrip() + "\n")
            else:
                raise AssertionError(f"{command}: not within {timeout_s:g} s: {''.join(printed)}")
        finally:
            late.cancel()
        assert line == f"{end} 0\n", f"{command}: {''.join(printed)}"
        return "".join(printed)

    def close(self) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        self._bash.wait(timeout=10)


@contextmanager
def terminal(folder: Path, environment: Mapping[str, str]) -> Iterator[Terminal]:
    found = Terminal(folder, environment)
    try:
        yield found
    finally:
        found.close()


@dataclass(frozen=True, slots=True)
class Walk:
    """seconds: of all. sent, lost, wrong: of the load while a replica moved there and back."""

    seconds: float
    sent: int
    lost: int
    wrong: int


def start(terminal: Terminal, which: str) -> None:
    """The block that starts the regions."""
    (block,) = (block for block in ten_minutes()[:2] if which in block.text)
    _run(terminal, block)


def walk(terminal: Terminal, contexts: Contexts) -> Walk:
    """All that comes after the start: each command prints what it must, every answer has ONNX Runtime's own bits."""
    clock = SystemClock()
    began = clock.now()
    load: Load | None = None
    for block in ten_minutes()[2:]:
        if MOVES in block.text:
            with _asked(terminal, contexts) as load:
                _run(terminal, block)
        else:
            _run(terminal, block)
    assert load is not None, f"no {MOVES!r} in the README"
    for file in ("answer.npz", "archive.npz"):
        assert np.array_equal(_read(terminal, file), _right(terminal)), file
    sent = len(load.calls)
    return Walk(clock.now() - began, sent, sent - load.outcomes()["ok"], load.wrong)


def _run(terminal: Terminal, block: Block) -> None:
    for command in block.commands:
        (expected,) = (shown for begins, shown in PRINTED.items() if command.startswith(begins))
        if block.language == "python":
            (terminal.folder / "client.py").write_text(command)
            printed = terminal.type("python client.py")
        else:
            printed = terminal.type(command)
        for pattern in expected:
            assert re.search(pattern, printed, re.MULTILINE), f"{command}: no {pattern!r} in\n{printed}"


@contextmanager
def _asked(terminal: Terminal, contexts: Contexts) -> Iterator[Load]:
    """The README's client asks all the while for the README's line."""
    context = replace(contexts.get(), folder=str(terminal.folder / "client"))
    (output,) = np.load(terminal.folder / "answer.npz").files
    load = Load(context, "reader", {"x": _line(terminal)}, {output: _right(terminal)}, clients=2)
    load.start()
    try:
        wait_until(lambda: load.outcomes()["ok"] >= ENOUGH, 60.0, "answers before it moves")
        yield load
        answered = load.outcomes()["ok"]
        wait_until(lambda: load.outcomes()["ok"] >= answered + ENOUGH, 60.0, "answers after it moved")
    finally:
        load.stop()


def _line(terminal: Terminal) -> ocr.Floats:
    return np.asarray(np.load(terminal.folder / "line.npz")["x"], np.float32)


def _read(terminal: Terminal, file: str) -> ocr.Floats:
    (found,) = np.load(terminal.folder / file).values()
    return np.asarray(found)


def _right(terminal: Terminal) -> ocr.Floats:
    """By ONNX Runtime in this process."""
    (found,) = in_process(Path(ocr.files().recogniser).read_bytes(), {"x": _line(terminal)}).values()
    return np.asarray(found)
