"""A second attempt for the few tests that failed: `python -m harness.flaky PHASE PYTEST-ARGUMENT...`.

Tests of real processes share a machine with whatever else it does. Where at most MAX_FAILED of a phase failed, each
is played once more, by itself, with fixtures of its own. What passes then is not forgotten: it is a line in `flaky.txt`
at the root, which `harness.report` reads out, and it is a fault to look for, of the test or of the product. More than
these, an interrupted phase, or a second failure fail the phase. Simulations have no second attempt: a seed that failed
fails again.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MAX_FAILED = 6

ROOT = Path(__file__).resolve().parents[2]
FLAKY = ROOT / "flaky.txt"

_TESTS_FAILED = 1  # as pytest's ExitCode says


def run(phase: str, arguments: Sequence[str], flaky: Path = FLAKY) -> int:
    """Exit status of pytest, of its second attempt where there was one. What passed then is added to `flaky`."""
    cache = Path(".pytest_cache") / phase
    remembered = cache / "v/cache/lastfailed"
    remembered.unlink(missing_ok=True)
    status = _pytest(cache, arguments)
    failed = sorted(json.loads(remembered.read_text())) if remembered.exists() else []
    if status != _TESTS_FAILED or not 0 < len(failed) <= MAX_FAILED:
        return status
    print(f"\nsecond attempt, by itself, of {', '.join(failed)}", flush=True)
    again = _pytest(cache, [*arguments, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"])
    if again == 0:
        with flaky.open("a") as file:
            file.writelines(f"{phase}: {test}\n" for test in failed)
    return again


def _pytest(cache: Path, arguments: Sequence[str]) -> int:
    return subprocess.call([sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
