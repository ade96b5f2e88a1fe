"""The process supervisor of a local federation whose members run different versions: `python -P versions_supervisor.py
FOLDER`.

FOLDER/versions.json maps each version to its PYTHONPATH; FOLDER/versions/NAME says which one a member runs. `python -P
versions_supervisor.py FOLDER NODE VERSION` installs a version there, as a platform would: NODE is a name, or a
coordinator's HOST:PORT. Imports nothing of the tests.
"""

import asyncio
import json
import socket
import sys
from pathlib import Path

from shoal.host.unix_sockets import socket_address


def install(folder: Path, node: str, version: str) -> None:
    """Stop the member cleanly and start it with that version; returns when it listens."""
    if version not in json.loads((folder / "versions.json").read_text()):
        sys.exit(f"there is no version {version}")
    member = node
    if ":" in node:
        members = json.loads((folder / "stack.json").read_text())["members"]
        port = node.rpartition(":")[2]
        member = next(one["name"] for one in members if one["addresses"].get("link", "").endswith(f":{port}"))
    (folder / "versions").mkdir(exist_ok=True)
    (folder / "versions" / member).write_text(version)
    with socket.socket(socket.AF_UNIX) as connection, socket_address(folder / "supervisor.sock") as address:
        connection.settimeout(90)
        connection.connect(address)
        connection.sendall(json.dumps({"op": "restart", "name": member}).encode() + b"\n")
        reply = json.loads(connection.makefile().readline())
    if "refusal" in reply:
        sys.exit("  ".join(reply["refusal"]))


def supervise(folder: Path) -> None:
    from shoal.devstack import layout
    from shoal.devstack.layout import StackMember
    from shoal.devstack.process_supervisor import ProcessSupervisor

    places = json.loads((folder / "versions.json").read_text())

    class Mixed(ProcessSupervisor):
        def command(self, member: StackMember) -> list[str]:
            chosen = folder / "versions" / member.name
            place = places[chosen.read_text() if chosen.exists() else "first"]
            return ["env", f"PYTHONPATH={place}", *super().command(member)]

    asyncio.run(Mixed(folder, layout.load(folder)).run())


if __name__ == "__main__":
    if len(sys.argv) == 2:
        supervise(Path(sys.argv[1]))
    else:
        install(Path(sys.argv[1]), *sys.argv[2:4])
