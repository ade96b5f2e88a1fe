"""A35: a process that a stranger's model took over has no network, no secrets, no signals, and no way back to them."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

_CAPTURED = """
import ctypes, json, os, resource, signal, socket, sys
from pathlib import Path
from shoal.host import sandbox
from shoal.host.sandbox import Access

root, port, victim = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
host = os.open("/proc/self/ns/net", os.O_RDONLY)
own = {root / "models": Access.OPEN, root / "run": Access.MAKE_SOCKET, root / "run/slots": Access.KEEP}
refused = sandbox.enter(sandbox.runtime() | own)
found = {}

def attempt(name, act):
    try:
        act()
        found[name] = "done"
    except OSError as error:
        found[name] = "refused"

def listen():
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(root / "run/own.sock"))

def go_back():
    if ctypes.CDLL(None, use_errno=True).setns(host, 0) != 0:
        raise OSError

attempt("key", (root / "identity/key.pem").read_bytes)
attempt("nonce", (root / "run/other.json").read_bytes)
attempt("overwrite", lambda: (root / "run/other.json").write_text("{}"))
attempt("remove", (root / "run/other.json").unlink)
attempt("home", lambda: list(Path.home().iterdir()))
attempt("list models", lambda: list((root / "models").iterdir()))
attempt("other's environment", Path(f"/proc/{victim}/environ").read_bytes)
attempt("other's memory", lambda: os.open(f"/proc/{victim}/mem", os.O_RDONLY))
attempt("kill", lambda: os.kill(victim, signal.SIGTERM))
attempt("other's limit of files", lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, (3, 3)))
attempt("other's limit of processor time", lambda: resource.prlimit(victim, resource.RLIMIT_CPU, (1, 1)))
attempt("other's cores", lambda: os.sched_setaffinity(victim, {0}))
attempt("other's policy", lambda: os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0)))
attempt("other's priority", lambda: os.setpriority(os.PRIO_PROCESS, victim, 19))
attempt("priority of all of its user's", lambda: os.setpriority(os.PRIO_USER, 0, 19))
attempt("connect", lambda: socket.create_connection(("127.0.0.1", port), 2))
attempt("go back to the network", go_back)
attempt("program", lambda: os.execv("/bin/true", ["true"]))
attempt("model", (root / "models/digest").read_bytes)
attempt("lock", lambda: (root / "run/slots/cpu0-0.lock").write_text(""))
attempt("socket", listen)
attempt("own limit", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
attempt("own cores", lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)))
attempt("own priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, 19))
import numpy
found["capabilities"] = [line for line in open("/proc/self/status") if line.startswith("CapEff")][0].split()[1]
print(json.dumps({"refused": refused, "found": found}))
"""
MAY = {"model", "lock", "socket", "own limit", "own cores", "own priority"}


def test_a_captured_process_reaches_nothing_but_its_work(tmp_path: Path) -> None:
    for folder in ("identity", "models", "run/slots"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("identity/key.pem", "models/digest", "run/other.json"):
        (tmp_path / name).write_text("secret")
    server = socket.create_server(("127.0.0.1", 0))
    with subprocess.Popen(["/bin/sleep", "60"]) as victim, server:
        command = [sys.executable, "-P", "-c", _CAPTURED, str(tmp_path), str(server.getsockname()[1]), str(victim.pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        alive = victim.poll() is None
        victim.send_signal(signal.SIGKILL)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    if said["refused"] and not os.environ.get("CI"):
        pytest.skip(f"not covered, this kernel refuses: {said['refused']}")
    assert said["refused"] == []
    found = said["found"]
    assert found.pop("capabilities") == "0" * 16
    assert found == {name: "done" if name in MAY else "refused" for name in found}
    assert alive
    assert (tmp_path / "run/other.json").read_text() == "secret"
