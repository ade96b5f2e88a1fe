"""The tutorial as a user types it: one command after another into one shell, with the output that each must print."""

import re
import subprocess
import sys
import threading
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from harness.clients.triton import run_in_process
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.client import Context, Contexts
from shoal.devstack import ocr
from shoal.devstack.load import ClosedLoopLoad

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = ROOT / "docs" / "tutorial.md"
END: Final = "\n## Break it\n"
"""The heading behind which `tutorial_end.py` types: it ends the regions."""
PROCESSES, CONTAINERS = "shoal dev up", "docker compose up"
"""In the block that starts the regions of the one kind, or of the other."""
MIGRATION_COMMAND: Final = "shoal migrate"
"""Marks the block of migrations."""
MIN_ANSWERS: Final = 10
"""Answers that the load must get before what happens under it, and after that."""
_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANSWER: Final = r"softmax_11.tmp_0\s+float32\s+1x40x6625"
_READY: Final = r"^ready$"
_DIGEST: Final = r"sha256:[0-9a-f]{64}"

PRINTED: Final[Mapping[str, tuple[str, ...]]] = {
    ". .venv/bin/activate": (),
    "shoal dev up": (r"^up: region home with 4 agents on grpc links, 2 regions",),
    "shoal get nodes": (r"^edge-npu +agent +ready", r"gateway +gateway +ready"),
    "shoal get devices -o wide": (r"^edge-npu/qualcomm-ai100-dm2 +emulated .*\(profile, of the whole .*\)",),
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
    "shoal drain": (
        r"^edge-npu is cordoned",
        r"default/reader +edge-npu/\S+ \(emulated\) -> .* done$",
    ),
    "shoal uncordon": (r"^edge-npu takes work again$",),
    "shoal can-move": (r"^yes: default/reader to edge-npu",),
    "shoal migrate": (
        r"default/reader +\S+.* -> edge-npu/\S+ \(emulated\) +done",
        r"^verified against source .*: passed$",
    ),
    "shoal get migrations": (r"default/reader .* done .* drain ", r"default/reader .* done .* operator "),
    "shoal apply -f examples/archive.yaml": (r"not placed: COST_OVER ", _READY),
    "shoal get agreements": (r" origin +\S+ +default/archive +active +ready ",),
    "shoal infer archive": (_ANSWER,),
    "shoal apply -f examples/sturdy.yaml": (r"^default/sturdy-reader +2 of 2 placed", _READY),
    "shoal doctor": (r"^\d+ passed, 0 failed$",),
    "import os": (r"^softmax_11.tmp_0 \(1, 40, 6625\) True$",),
}
"""Beginning of a command -> what it must print."""


@dataclass(frozen=True, slots=True)
class Block:
    """Commands typed together. language: sh or python."""

    language: str
    text: str

    @property
    def commands(self) -> tuple[str, ...]:
        return (self.text,) if self.language == "python" else tuple(self.text.splitlines())


def ten_minutes() -> tuple[Block, ...]:
    """What the page tells the user to type, in order; the two ways to start are its first blocks."""
    return blocks_of(PAGE.read_text().partition(END)[0])


def blocks_of(page: str) -> tuple[Block, ...]:
    """What a page tells the user to type, in order."""
    found = (Block(*match.groups()) for match in _BLOCK.finditer(page))
    return tuple(block for block in found if block.language in ("sh", "python"))


class Terminal:
    """A persistent shell, in a folder with the files of the repository's root that the page uses."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "examples").symlink_to(ROOT / "examples")
        self._bash = subprocess.Popen(
            ["bash"], cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def type(self, command: str, timeout_s: float = 150.0, statuses: Container[int] = (0,)) -> str:
        """Type a command and return its output. An assertion fails if its status is none of these or it exceeds the
        timeout."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        end = "this was it:"
        late = threading.Timer(timeout_s, self._bash.kill)
        late.start()
        try:
            self._bash.stdin.write(f"{{ {command}\n}} </dev/null; printf '\\n{end} %s\\n' $?\n")
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
        status = int(line.removeprefix(end))
        assert status in statuses, f"{command}: status {status}: {''.join(printed)}"
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
class WalkthroughResult:
    """seconds: of everything. sent, lost, wrong: of the load while a replica migrated there and back."""

    duration_s: float
    sent_count: int
    lost_count: int
    wrong_count: int


def start_regions(terminal: Terminal, which: str) -> None:
    """The block that starts the regions."""
    (block,) = (block for block in ten_minutes()[:2] if which in block.text)
    _run(terminal, block)


def run_walkthrough(terminal: Terminal, contexts: Contexts) -> WalkthroughResult:
    """Everything after the start: each command prints what it must, and every answer equals ONNX Runtime's bits."""
    clock = SystemClock()
    began = clock.now()
    load: ClosedLoopLoad | None = None
    for block in ten_minutes()[2:]:
        if MIGRATION_COMMAND in block.text:
            context = replace(contexts.get(), folder=str(terminal.folder / "client"))
            with background_load(terminal, context, "reader") as load:
                _run(terminal, block)
        else:
            _run(terminal, block)
    assert load is not None, f"no {MIGRATION_COMMAND!r} in the tutorial"
    for file in ("answer.npz", "archive.npz"):
        assert np.array_equal(_read(terminal, file), _expected_output(terminal)), file
    sent = len(load.calls)
    return WalkthroughResult(clock.now() - began, sent, sent - load.outcomes()["ok"], load.wrong_count)


def statuses_of(command: str) -> Container[int]:
    """Those of a command that went well."""
    return (0, 1) if re.search(r"(^|[|] )shoal plan\b", command) or " --dry-run" in command else (0,)


def _run(terminal: Terminal, block: Block) -> None:
    for command in block.commands:
        (expected,) = (shown for begins, shown in PRINTED.items() if command.startswith(begins))
        if block.language == "python":
            (terminal.folder / "client.py").write_text(command)
            printed = terminal.type("python client.py")
        else:
            printed = terminal.type(command, statuses=statuses_of(command))
        for pattern in expected:
            assert re.search(pattern, printed, re.MULTILINE), f"{command}: no {pattern!r} in\n{printed}"


@contextmanager
def background_load(terminal: Terminal, context: Context, workload: str) -> Iterator[ClosedLoopLoad]:
    """Ask a workload of the recogniser continuously, with the page's input. Some are answered before and after."""
    (output,) = np.load(terminal.folder / "answer.npz").files
    load = ClosedLoopLoad(context, workload, {"x": _line(terminal)}, {output: _expected_output(terminal)}, clients=2)
    load.start()
    try:
        wait_until(lambda: load.outcomes()["ok"] >= MIN_ANSWERS, 60.0, "answers before it begins")
        yield load
        answered = load.outcomes()["ok"]
        wait_until(lambda: load.outcomes()["ok"] >= answered + MIN_ANSWERS, 60.0, "answers after it ended")
    finally:
        load.stop()


def _line(terminal: Terminal) -> ocr.Floats:
    return np.asarray(np.load(terminal.folder / "line.npz")["x"], np.float32)


def _read(terminal: Terminal, file: str) -> ocr.Floats:
    (found,) = np.load(terminal.folder / file).values()
    return np.asarray(found)


def _expected_output(terminal: Terminal) -> ocr.Floats:
    """Computed by ONNX Runtime in this process."""
    (found,) = run_in_process(Path(ocr.files().recogniser).read_bytes(), {"x": _line(terminal)}).values()
    return np.asarray(found)
