"""A13: fuzzed input. Every input is accepted or refused with a code: no other error, no unbounded wait, no unbounded
memory.

The fuzzer runs in processes of its own, guided by coverage; `tests/integration/attacks` sends fuzzed frames over the
wire.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuzz.targets import OK
from harness.report import IN_PROCESS, record

TESTS = Path(__file__).parents[1]
NAMES = ("link", "to-agent", "receipts", "federation", "trade", "infer", "frames", "http2", "rest", "http", "yaml")
FORGED = ("receipts", "federation")
SEED = 13


class Fuzzer:
    """The process that is instrumented, and fuzzes one target at a time in children of its own.

    Started by a shell: Linux counts what a process held before its `exec` to its peak, and libFuzzer, which judges
    memory by the peak, would otherwise find the size of this test runner in every target.
    """

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", '"$@"; exit $?', "fuzz", sys.executable, "-m", "fuzz", str(runs), str(SEED)],
            env={**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"},  # with what is compiled
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fuzz(self, name: str, folder: Path) -> None:
        """A find is printed with the input that does it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, folder, file=self._process.stdin, flush=True)
        status = self._process.stdout.readline().strip()
        log = folder / "log"
        said = log.read_text(errors="replace")[-1500:] if log.exists() else "the fuzzer did not start"
        finds = [path for path in folder.iterdir() if path.name.startswith(("crash-", "timeout-", "oom-", "leak-"))]
        assert not finds, f"{name}, seed {SEED}: {finds[0].read_bytes()!r}\n{said}"
        assert status == "0", said
        codes: dict[str, int] = json.loads((folder / "codes.json").read_text())
        assert sum(codes.values()) == self.runs
        refused = {code: count for code, count in codes.items() if code != OK}
        assert refused, "the fuzzer found nothing that is refused: it does not reach the code"
        assert (OK in codes) == (name not in FORGED), "sound inputs were taken; what nobody signed was not"
        corpus = len(list((folder / "corpus").iterdir()))
        runs, accepted = self.runs, codes.get(OK, 0)
        record("A13", IN_PROCESS, runs, seed=SEED, crashes=0, corpus=corpus, accepted=accepted, codes=len(refused))

    def end(self) -> None:
        self._process.communicate()


@contextmanager
def fuzzer(runs: int) -> Iterator[Fuzzer]:
    started = Fuzzer(runs)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def five_thousand() -> Iterator[Fuzzer]:
    with fuzzer(5_000) as found:
        yield found


@pytest.fixture(scope="module")
def a_hundred_thousand() -> Iterator[Fuzzer]:
    with fuzzer(100_000) as found:
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_a13_five_thousand_inputs(five_thousand: Fuzzer, name: str, tmp_path: Path) -> None:
    five_thousand.fuzz(name, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", NAMES)
def test_a13_a_hundred_thousand_inputs(a_hundred_thousand: Fuzzer, name: str, tmp_path: Path) -> None:
    a_hundred_thousand.fuzz(name, tmp_path)
