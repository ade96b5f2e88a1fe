"""F32: a disk fills while a process logs. The log loses lines, and its writer is not affected otherwise."""

import subprocess
import sys
from pathlib import Path

ROOM = 1000
PROGRAM = f"""
import resource, structlog
from shoal.host import logs
resource.setrlimit(resource.RLIMIT_FSIZE, ({ROOM}, -1))
logs.configure("info", process="test")
for number in range(100):
    structlog.get_logger().info("a line", number=number)
print("still here")
"""


def test_f32_log_on_a_full_disk(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=stderr, check=False)
    assert log.stat().st_size == ROOM, "it was full"
    assert (done.returncode, done.stdout) == (0, b"still here\n")
