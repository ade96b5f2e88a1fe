"""The lines of `token create --count`, run as the guide `fleet.md` runs them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final

from harness.clients import tutorial
from harness.wait import wait_until

TOKENS: Final = ("first-secret", "second-secret")
_RECORDER: Final = """#!/bin/bash
printf '%s\\n' "$$ ${0##*/} $*" >> "$FOLDER/arguments"
"""
"""Notes its process and its arguments."""


def put_program(folder: Path, name: str, more: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(_RECORDER + more)
    (folder / name).chmod(0o700)


def test_no_token_is_an_argument_of_a_process(tmp_path: Path) -> None:
    """Every user of a machine can read those. What the page's last block ends are the agents themselves."""
    blocks = tutorial.blocks_of((tutorial.ROOT / "docs" / "guides" / "fleet.md").read_text())
    (joining,) = (block.text for block in blocks if "token create" in block.text)
    programs = tmp_path / "bin"
    lines = "".join(f"SHOAL_TOKEN={token} shoal-agent run --state-dir './a place'\n" for token in TOKENS)
    (tmp_path / "lines").write_text(lines)
    put_program(programs, "shoal", '[ "$1" = token ] && cat "$FOLDER/lines" || true\n')
    put_program(programs, "shoal-agent", 'echo "$SHOAL_TOKEN" >> "$FOLDER/joined"; exec sleep 60\n')
    for name in ("bash", "sh", "env"):
        put_program(programs, name, f'exec {shutil.which(name)} "$@"\n')
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "FOLDER": str(tmp_path)}
    command = ["/bin/bash", "-c", f"set -e; umask 022\n{joining}\njobs -p > pids"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=30)
    jobs = [int(text) for text in (tmp_path / "pids").read_text().split()]
    joined, arguments = tmp_path / "joined", tmp_path / "arguments"
    try:
        wait_until(lambda: joined.exists() and len(joined.read_text().split()) == 2, 10.0, "both to join")
        found = arguments.read_text()
        assert sorted(joined.read_text().split()) == sorted(TOKENS)
        assert not [token for token in TOKENS if token in found], found
        agents = re.findall(r"^(\d+) shoal-agent run --state-dir \./a place --no-cpu --emulate rk3588s$", found, re.M)
        assert sorted(map(int, agents)) == sorted(jobs), found
        assert (tmp_path / "join.txt").stat().st_mode & 0o077 == 0, "nobody else may read it"
    finally:
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job, signal.SIGKILL)
