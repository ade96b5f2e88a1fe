"""A50, in one process: whatever is logged, by whomever, is one line that a terminal shows as text."""

import json
import socket
import subprocess
import sys
from typing import Any

from shoal.host.logs import MAX_VALUE_CHARS

HOSTILE = "a\nb\r\x1b[31mred\x1b]0;title\x07\x00\x9b2J \u202egpj.exe \u2028 \ud800"
PROGRAM = """
import asyncio, logging, sys, warnings
import structlog
from shoal.host import logs

hostile = eval(sys.argv[1])
logs.configure(process="test")
log = structlog.get_logger("early")
log.info(hostile, found=hostile, nested={hostile: [hostile]})
log.debug("not told at this level")
logging.getLogger("library").error("says %s", hostile)
logging.getLogger("library").info("chatter of libraries is not told")
warnings.warn(hostile)
try:
    raise ValueError(hostile)
except ValueError:
    log.exception("caught")
log.info("long", text="x" * 1_000_000)

async def forgotten():
    raise RuntimeError(hostile)

async def main():
    task = asyncio.create_task(forgotten())
    await asyncio.wait([task])
    del task

asyncio.run(main())
raise KeyError(hostile)
"""


def lines_of(program: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", program, ascii(HOSTILE)], capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == b""
    raw = done.stderr.splitlines()
    assert all(0x20 <= byte < 0x7F for line in done.stderr.split(b"\n") for byte in line), "printable ASCII"
    return [json.loads(line) for line in raw]


def test_a50_one_event_is_one_line() -> None:
    told = lines_of(PROGRAM)
    assert [line["event"] for line in told] == [
        HOSTILE,
        "library_message_logged",
        "library_message_logged",
        "caught",
        "long",
        "library_message_logged",
        "process_crashed",
    ]
    assert [line["level"] for line in told] == ["info", "error", "warning", "error", "info", "error", "error"]
    assert all(line["process"] == "test" and line["timestamp"] for line in told)
    assert told[0]["found"] == told[0]["event"] == HOSTILE, "nothing is lost"
    assert told[0]["nested"] == {HOSTILE: [HOSTILE]}
    assert (told[1]["logger"], told[1]["message"]) == ("library", f"says {HOSTILE}")
    assert "UserWarning" in told[2]["message"]
    assert "ValueError" in told[3]["exception"]
    assert len(told[4]["text"]) < MAX_VALUE_CHARS + 40
    assert told[4]["text"].endswith("of 1000000 characters")
    assert "RuntimeError" in told[5]["exception"]
    assert "KeyError" in told[6]["exception"]


def test_a_line_and_its_end_are_one_write() -> None:
    """A supervisor, its front and its workers have one stderr: the line of another must not come between."""
    program = """
import structlog
from shoal.host import logs
logs.configure(process="test")
for number in range(3):
    structlog.get_logger().info("told", number=number)
"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        subprocess.run([sys.executable, "-c", program], stderr=theirs.fileno(), timeout=60, check=True)
        ours.setblocking(False)
        writes = [ours.recv(65536) for _ in range(3)]
    assert [json.loads(each)["number"] for each in writes] == [0, 1, 2]
    assert all(each.endswith(b"}\n") for each in writes)
