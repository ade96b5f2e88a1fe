"""The coordinator's end of a simulated link, and messages for it."""

from collections.abc import Collection, Mapping
from typing import Final

from shoal.types.assignment import Status
from shoal.types.codes import Refusal
from shoal.types.device import Node, Role
from shoal.types.link import Hello, Reported, Welcome
from shoal.types.units import Bytes, Seconds, Wall

SENT: Final = 40
"""Messages that a test sends."""


class RecordingLinkEvents:
    """ports.LinkEvents that records what arrives."""

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.closed_epochs: list[int] = []

    async def on_hello(self, node: str, role: Role, hello: Hello, *, peer: str = "") -> Welcome | Refusal:
        return Welcome(7, hello.nonce, "h", 1, Seconds(1.0), Wall(0.0))

    def on_status(self, node: str, epoch: int, status: Status) -> Refusal | None:
        self.sequences.append(status.sequence)
        return None

    async def on_message(self, node: str, epoch: int, message: Reported | Hello) -> Refusal | None:
        raise AssertionError(message)

    async def on_link_lost(self, nodes: Collection[str]) -> None:
        raise AssertionError(nodes)

    async def on_link_closed(self, sessions: Mapping[str, int], *, is_lost: bool) -> None:
        self.closed_epochs += sessions.values()

    async def on_link_restored(self) -> None:
        raise AssertionError

    async def on_close(self, node: str, epoch: int) -> None:
        self.closed_epochs.append(epoch)


def hello() -> Hello:
    node = Node(
        "a", "sim", Role.AGENT, {}, "1", "x", "x", Bytes(1), Bytes(1), (), "a:1", "a:4", "boot"
    )  # fmt: skip
    return Hello(node, "nonce", None, 1, Wall(0.0))


def status(sequence: int) -> Status:
    return Status("a", 7, sequence, True, None, (), (), (), (), Wall(0.0), True)
