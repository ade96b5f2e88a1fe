"""A local federation of several versions of Shoal: this one, an earlier and a later one.

Earlier and later ones are this code behind a shim. The earlier one neither writes nor reads the newest fields and
offers the oldest protocol. The later one adds a field to every message and offers an unknown protocol. A real earlier
version is a commit of the history, if that is available.
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

from harness.cluster import versions_supervisor
from harness.cluster.stack import DevStack
from harness.models.synthetic import relu
from harness.ports import free_ports
from shoal.devstack.control import Control
from shoal.devstack.layout import StackOptions

EARLIER, NOW, LATER = "0.0.9", version("shoal-orchestrator-agent"), "9.0.0"
ROOT = Path(__file__).resolve().parents[3]
DISTRIBUTIONS = {
    "shoal-orchestrator-protos": "protos",
    "shoal-orchestrator-policies": "policies",
    "shoal-orchestrator-agent": "agents",
    "shoal-orchestrator-coordinator": "coordinator",
    "shoal-orchestrator": "cli",
}

_SHIM = '''"""{what} Imported by every process that has this folder in its PYTHONPATH."""

from shoal.types import link
from shoal.wire import nouns

link.PROTOCOL = {protocol}
link.negotiate_protocol.__kwdefaults__["newest"] = {protocol}
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
    "Node": ("unconfined", "forward_key", "subscribes"),
    "Status": ("asks_lease", "subscriptions"),
    "DesiredSet": ("asleep", "forwarding", "routes_on_demand"),
    "Assignment": ("session", "handover", "handover_sources", "capture"),
    "Observed": ("sessions",),
}
"""Fields that came in lately, by message."""


def earlier(folder: Path) -> str:
    """PYTHONPATH of a version that does not know the newest fields."""
    change = f"[message.ClearField(each) for each in {_UNKNOWN!r}.get(message.DESCRIPTOR.name, ())]"
    shim = _SHIM.format(what="An earlier version.", protocol=1, change=change, before_reading="changed(message)")
    return _declare_version(folder, EARLIER, shim)


def later(folder: Path) -> str:
    """PYTHONPATH of a version with an additional field in every message and an additional protocol."""
    change = 'message.MergeFromString(bytes.fromhex("ba3e03") + b"new")  # field 999'
    shim = _SHIM.format(what="A later version.", protocol=99, change=change, before_reading="pass")
    return _declare_version(folder, LATER, shim)


def of_history(folder: Path, commit: str) -> str | None:
    """PYTHONPATH of the real code of a commit; None if the local history does not contain it."""
    found = subprocess.run(
        ["git", "-C", ROOT, "archive", commit, *DISTRIBUTIONS.values()], capture_output=True, check=False
    )
    if found.returncode != 0:
        return None
    tree = folder / "tree"
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as packed:
        packed.extractall(tree, filter="data")
    return ":".join([_declare_version(folder, EARLIER, ""), *(str(tree / each) for each in DISTRIBUTIONS.values())])


def _declare_version(folder: Path, number: str, shim: str) -> str:
    """A folder that says of every distribution that it is this version, entry points and all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in DISTRIBUTIONS:
        entry_points = distribution(name).read_text("entry_points.txt") or ""
        former = name.replace("shoal-orchestrator", "shoal")  # what commits before the change of names ask for
        for declared, listed in ((name, entry_points), (former, "")):
            info = folder / f"{declared.replace('-', '_')}-{number}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared}\nVersion: {number}\n")
            (info / "entry_points.txt").write_text(listed)
    if shim:
        (folder / "sitecustomize.py").write_text(shim)
    return str(folder)


class _Control(Control):
    def _supervisor_command(self) -> list[str]:
        return [sys.executable, "-P", versions_supervisor.__file__, str(self.folder)]


class MixedStack(DevStack):
    """A stack in which each member runs its own version."""

    def __init__(self, folder: Path, places: Mapping[str, str], first: str, chosen: Mapping[str, str]) -> None:
        """places: version -> PYTHONPATH; this version is always included. first: the version of all members that are
        not in `chosen`."""
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
        return f"{sys.executable} -P {versions_supervisor.__file__} {self.control.folder} {{node}} {{version}}"

    def install(self, name: str, number: str) -> None:
        versions_supervisor.install(self.control.folder, name, number)

    def running_versions(self) -> dict[str, str]:
        """Reported version of every node, and of every coordinator by its address."""
        with self.api() as api:
            nodes = {view.node.name: view.node.agent_version for view in api.get("nodes").nodes}
            leads = {address: reply.version for address, reply in api.coordinators().items() if reply is not None}
        return {**nodes, **leads}


@contextmanager
def mixed_stack(
    folder: Path,
    places: Mapping[str, str],
    first: str,
    asked: StackOptions,
    chosen: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[MixedStack]:
    """With the model `relu` in the first region."""
    stack = MixedStack(folder, places, first, chosen)
    try:
        stack.up(asked)
        stack.push(relu().SerializeToString(), "relu")
        yield stack
    finally:
        stack.down()
