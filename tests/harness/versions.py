"""A local federation of several versions of Shoal: this one, one before it, one after it.

Earlier and later ones are this code behind another name: the earlier one neither writes nor reads the newest fields and
offers the oldest protocol; the later one adds a field to every message and offers a protocol that nobody has. A real
earlier one is a commit of the history, where that is there.
"""

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import distribution, version
from pathlib import Path
from types import MappingProxyType

from harness import versions_keeper
from harness.crafted import relu
from harness.ports import free_ports
from harness.stack import Stack
from shoal.devstack.control import Control
from shoal.devstack.layout import Asked

EARLIER, NOW, LATER = "0.0.9", version("shoal-agent"), "9.0.0"
ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {
    "shoal-protos": "protos",
    "shoal-policies": "policies",
    "shoal-agent": "agents",
    "shoal-coordinator": "coordinator",
    "shoal": "cli",
}

_SHIM = '''"""{what} Imported by every process that has this folder in its PYTHONPATH."""

from shoal.types import link
from shoal.wire import nouns

link.PROTOCOL = {protocol}
link.spoken.__kwdefaults__["newest"] = {protocol}
fill, read = nouns._fill, nouns._read


def changed(message):
    {change}


def filled(message, noun):
    fill(message, noun)
    changed(message)


def was_read(kind, message):
    {before_reading}
    return read(kind, message)


nouns._fill, nouns._read = filled, was_read
'''
_UNKNOWN = {
    "Hello": ("newest",),
    "Welcome": ("protocol",),
    "Node": ("unconfined",),
    "Status": ("alone",),
    "DesiredSet": ("asleep",),
    "Assignment": ("session", "handover", "givers", "capture"),
    "Observed": ("sessions",),
}
"""Fields that came in lately, by message."""


def earlier(folder: Path) -> str:
    """PYTHONPATH of a version that does not know the newest fields."""
    change = f"[message.ClearField(each) for each in {_UNKNOWN!r}.get(message.DESCRIPTOR.name, ())]"
    shim = _SHIM.format(what="An earlier version.", protocol=1, change=change, before_reading="changed(message)")
    return _declared(folder, EARLIER, shim)


def later(folder: Path) -> str:
    """PYTHONPATH of a version with a field more in every message, and a protocol more."""
    change = 'message.MergeFromString(bytes.fromhex("ba3e03") + b"new")  # field 999'
    shim = _SHIM.format(what="A later version.", protocol=99, change=change, before_reading="pass")
    return _declared(folder, LATER, shim)


def of_history(folder: Path, commit: str) -> str | None:
    """PYTHONPATH of the real code of a commit; None where the history that is here does not reach it."""
    found = subprocess.run(
        ["git", "-C", ROOT, "archive", commit, *DISTRIBUTIONS.values()], capture_output=True, check=False
    )
    if found.returncode != 0:
        return None
    tree = folder / "tree"
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as packed:
        packed.extractall(tree, filter="data")
    return ":".join([_declared(folder, EARLIER, ""), *(str(tree / each) for each in DISTRIBUTIONS.values())])


def _declared(folder: Path, number: str, shim: str) -> str:
    """A folder that says of every distribution that it is this version, entry points and all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in DISTRIBUTIONS:
        info = folder / f"{name.replace('-', '_')}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        (info / "entry_points.txt").write_text(distribution(name).read_text("entry_points.txt") or "")
    if shim:
        (folder / "sitecustomize.py").write_text(shim)
    return str(folder)


class _Control(Control):
    def _keeper(self) -> list[str]:
        return [sys.executable, "-P", versions_keeper.__file__, str(self.folder)]


class MixedStack(Stack):
    """One of which each member runs a version of its own."""

    def __init__(self, folder: Path, places: Mapping[str, str], first: str, chosen: Mapping[str, str]) -> None:
        """places: PYTHONPATH by version; this version is always among them. first: the version that all start with but
        those that are named in `chosen`."""
        super().__init__(folder)
        self.control = _Control(folder / "dev", self.contexts, free_ports)
        (self.control.folder / "versions").mkdir(parents=True, mode=0o700)
        (self.control.folder / "versions.json").write_text(
            json.dumps({NOW: "", **places, "first": places.get(first, "")})
        )
        for name, number in chosen.items():
            (self.control.folder / "versions" / name).write_text(number)

    @property
    def installer(self) -> str:
        """For `shoal upgrade --exec`."""
        return f"{sys.executable} -P {versions_keeper.__file__} {self.control.folder} {{node}} {{version}}"

    def install(self, name: str, number: str) -> None:
        versions_keeper.install(self.control.folder, name, number)

    def runs(self) -> dict[str, str]:
        """Version of every node, and of every coordinator by its address, as they say."""
        with self.api() as api:
            nodes = {view.node.name: view.node.agent_version for view in api.get("nodes").nodes}
            leads = {address: reply.version for address, reply in api.coordinators().items() if reply is not None}
        return {**nodes, **leads}


@contextmanager
def mixed(
    folder: Path, places: Mapping[str, str], first: str, asked: Asked, chosen: Mapping[str, str] = MappingProxyType({})
) -> Iterator[MixedStack]:
    """With the model `relu` in the first region."""
    stack = MixedStack(folder, places, first, chosen)
    try:
        stack.up(asked)
        stack.push(relu().SerializeToString(), "relu")
        yield stack
    finally:
        stack.down()
