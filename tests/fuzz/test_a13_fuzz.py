"""A13: fuzzed input. Every input is accepted or refused with a code: no other error, no unbounded wait, no unbounded
memory.

The fuzzer runs in a process of its own, guided by coverage; `tests/integration/attacks` sends fuzzed frames over the
wire.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.targets import OK
from harness.report import IN_PROCESS, record

TESTS = Path(__file__).parents[1]
NAMES = ("link", "to-agent", "receipts", "federation", "trade", "infer", "frames", "http2", "rest", "http", "yaml")
FORGED = ("receipts", "federation")
SEED = 13


def fuzz(name: str, runs: int, folder: Path) -> None:
    """A find is printed with the input that does it.

    By a shell: Linux counts what a process held before its `exec` to its peak, and libFuzzer, which judges memory by
    the peak, would otherwise find the size of this test runner in every target.
    """
    done = subprocess.run(
        [
            "/bin/sh",
            "-c",
            '"$@"; exit $?',
            "fuzz",
            sys.executable,
            "-m",
            "fuzz",
            name,
            str(runs),
            str(SEED),
            str(folder),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"},  # with what is compiled
        capture_output=True,
        timeout=1200,
        check=False,
    )
    said = (done.stdout + done.stderr).decode(errors="replace")[-1500:]
    finds = [path for path in folder.iterdir() if path.name.startswith(("crash-", "timeout-", "oom-", "leak-"))]
    assert not finds, f"{name}, seed {SEED}: {finds[0].read_bytes()!r}\n{said}"
    assert done.returncode == 0, said
    codes: dict[str, int] = json.loads((folder / "codes.json").read_text())
    assert sum(codes.values()) == runs
    refused = {code: count for code, count in codes.items() if code != OK}
    assert refused, "the fuzzer found nothing that is refused: it does not reach the code"
    assert (OK in codes) == (name not in FORGED), "sound inputs were taken; what nobody signed was not"
    corpus = len(list((folder / "corpus").iterdir()))
    record("A13", IN_PROCESS, runs, seed=SEED, crashes=0, corpus=corpus, accepted=codes.get(OK, 0), codes=len(refused))


@pytest.mark.parametrize("name", NAMES)
def test_a13_five_thousand_inputs(name: str, tmp_path: Path) -> None:
    fuzz(name, 5_000, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", NAMES)
def test_a13_a_hundred_thousand_inputs(name: str, tmp_path: Path) -> None:
    fuzz(name, 100_000, tmp_path)
