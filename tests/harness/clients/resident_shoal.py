"""`shoal` for tests that type hundreds of its commands: one process imports the command line, and forks for each.

What is forked runs the program's own entry point, with the words, folder, environment, standard files and signals of
who called it. It saves the imports, which take longer than most commands.

`python resident_shoal.py SOCKET` serves; the program that `put_client` writes calls.
"""

import array
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_MOST_BYTES: Final = 1 << 20
"""Of the words and the environment of a call."""
_CLIENT: Final = """#!{python} -IS
import array, json, os, signal, socket, sys
call = {{"argv": ["shoal", *sys.argv[1:]], "folder": os.getcwd(), "environment": dict(os.environ)}}
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {most_bytes})
server.connect({address!r})
files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
server.sendmsg([json.dumps(call).encode()], files)
pid = int(server.recv(32))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
status = int(server.recv(32) or 70)
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextmanager
def resident_shoal(folder: Path) -> Iterator[Path]:
    """The folder that has to come first in `PATH`."""
    address = folder / "shoal.sock"
    programs = folder / "programs"
    programs.mkdir()
    client = programs / "shoal"
    client.write_text(_CLIENT.format(python=sys.executable, most_bytes=_MOST_BYTES, address=str(address)))
    client.chmod(0o700)
    server = subprocess.Popen([sys.executable, "-P", __file__, str(address)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "ready\n"
        yield programs
    finally:
        server.terminate()
        server.wait(10)
        server.stdout.close()


def _serve(address: str) -> None:
    import shoal.cli.commands

    for module in pkgutil.iter_modules(shoal.cli.commands.__path__, "shoal.cli.commands."):
        importlib.import_module(module.name)
    # Nobody waits for those that it forks: each tells its caller its status itself.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        caller, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            os._exit(_answer(caller))
        caller.close()


def _answer(caller: socket.socket) -> int:
    """Run what is called for in a child, and tell the caller its process, then its status."""
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _MOST_BYTES)
    text, ancillary, _, _ = caller.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    files = array.array("i")
    for _, _, each in ancillary:
        files.frombytes(each)
    call = json.loads(text)
    pid = os.fork()
    if pid == 0:
        caller.close()
        _become(call, files)
    caller.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    caller.send(str(os.waitstatus_to_exitcode(status)).encode())
    return 0


def _become(call: dict[str, object], files: Sequence[int]) -> None:
    """Be the program that was called."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server may have been started with it ignored
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    environment, folder = call["environment"], call["folder"]
    assert isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(str(folder))
    sys.argv = list(call["argv"])  # type: ignore[call-overload]
    from shoal.cli.main import main

    try:
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 1
    os._exit(status)


if __name__ == "__main__":
    _serve(sys.argv[1])
