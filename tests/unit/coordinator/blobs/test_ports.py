"""The adapters fit the ports that controllers know: the type checker reads this, and so does Python."""

import inspect
from pathlib import Path

from shoal.coordinator import ports
from shoal.coordinator.blobs.directory import DirectoryBlobs
from shoal.coordinator.blobs.inspect import ChildInspector
from shoal.types.units import Bytes


def test_the_adapters_fit(tmp_path: Path) -> None:
    blobs: ports.Blobs = DirectoryBlobs(tmp_path, Bytes(1))
    inspector: ports.Inspector = ChildInspector()
    for adapter, port in ((blobs, ports.Blobs), (inspector, ports.Inspector)):
        for name, wanted in inspect.getmembers(port, inspect.isfunction):
            if not name.startswith("_"):
                given = inspect.signature(getattr(type(adapter), name))
                assert list(given.parameters) == list(inspect.signature(wanted).parameters), name
