"""What a front applies of a configuration that it cannot apply as a whole, and in which order."""

import asyncio
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.crypto.pki import Authority
from shoal.agent.dataplane import control, main
from shoal.agent.dataplane.transport import TlsFiles
from shoal.agent.dataplane.trust import Authorities, load_library
from shoal.agent.frames import FrameMessage
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role

NOW = 1_800_000_000.0
WITHIN_S = 10.0
LIBRARY = "shoal.agent.dataplane.issuers"


class Front:
    """The handlers of one. What would serve only keeps what it is told."""

    def __init__(self, tmp_path: Path) -> None:
        own = Authority(tmp_path / "west", "west", NOW).issue(Role.GATEWAY, "g1")
        self.authorities = Authorities("west", TlsFiles(own.certificate, own.key, own.authority))
        self.east = Authority(tmp_path / "east", "east", NOW)
        self.peers = (PeerTrust("east", (self.east.certificate.read_text(),), ("g9",), ("ag-1",)),)
        self.applied: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        """Revoked serials, and names of other regions."""
        self.witnessed: list[tuple[str, ...]] = []
        self.stages = main._Lifecycle()
        self.stages.listening.set()
        plane = SimpleNamespace(configure=self._on_plane)
        witnesses = SimpleNamespace(configure=lambda _, revoked: self.witnessed.append(revoked))
        parts: list[Any] = [plane, witnesses, None, self.authorities, None, self.stages, None]
        self._configure = main._handlers(*parts)["configure"]

    async def configure(self, revoked: tuple[str, ...], peers: tuple[PeerTrust, ...] = ()) -> None:
        said = control.ServingConfig(revoked_serials=revoked, peers=peers)
        assert (await self._configure(FrameMessage("configure", {}, control.pack(said)))).kind == "configured"

    def _on_plane(self, *told: Any, **_: object) -> None:
        self.applied.append((told[3], tuple(peer.region for peer in told[4])))

    @property
    def believes_east(self) -> bool:
        return self.authorities.roots_of("east", "g9") is not None


@pytest.fixture
def front(tmp_path: Path) -> Front:
    return Front(tmp_path)


async def test_without_the_library_all_counts_but_other_regions(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that is revoked must not pass because the installation is broken beneath a front that runs."""
    await front.configure(("1",))
    monkeypatch.setitem(sys.modules, LIBRARY, None)
    for _ in range(2):  # the supervisor tries again
        with pytest.raises(ShoalError, match=Code.INTERNAL):
            await front.configure(("1", "2"), front.peers)
    assert front.applied == [(("1",), ()), (("1", "2"), ()), (("1", "2"), ())]
    assert front.witnessed == [("1",), ("1", "2"), ("1", "2")]
    assert not front.believes_east
    monkeypatch.undo()
    await front.configure(("1", "2"), front.peers)
    assert front.applied[-1] == (("1", "2"), ("east",))
    assert front.believes_east


async def test_a_first_configuration_without_the_library_lets_the_front_serve(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, LIBRARY, None)
    with pytest.raises(ShoalError, match=Code.INTERNAL):
        await front.configure((), front.peers)
    assert front.stages.configured.is_set()


async def test_other_regions_that_cannot_be_read_are_believed_no_more(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    await front.configure((), front.peers)
    assert front.believes_east

    def fail(*_: object) -> None:
        raise ValueError("of whatever kind")

    monkeypatch.setattr("shoal.agent.dataplane.issuers.roots_of_peer", fail)
    changed = (PeerTrust("east", front.peers[0].roots, ("g9",), ("ag-2",)),)
    with pytest.raises(ShoalError, match=Code.INTERNAL):
        await front.configure(("2",), changed)
    assert front.applied[-1] == (("2",), ())
    assert not front.believes_east


async def test_the_library_is_imported_beside_the_loop_and_configurations_keep_their_order(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, importing, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def import_slowly() -> None:
        loop.call_soon_threadsafe(importing.set)
        assert may_end.wait(WITHIN_S)
        load_library()

    monkeypatch.setattr(main, "load_library", import_slowly)
    async with asyncio.timeout(WITHIN_S):
        first = asyncio.create_task(front.configure(("1",), front.peers))
        await importing.wait()  # which needs the loop
        second = asyncio.create_task(front.configure(("1", "2")))
        await asyncio.wait((second,), timeout=0)  # a round of the loop
        assert front.applied == []
        may_end.set()
        await asyncio.gather(first, second)
    assert front.applied == [(("1",), ("east",)), (("1", "2"), ())]
    assert not front.believes_east
