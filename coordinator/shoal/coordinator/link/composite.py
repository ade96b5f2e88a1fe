"""Several links as one: a node has one session at a time, on the link that it connected by."""

from shoal.coordinator.ports import AgentLinks
from shoal.types.codes import Refusal
from shoal.types.link import ToAgent


class CompositeLinks:
    """ports.AgentLinks. Each link drops messages for a node that has no session on it."""

    def __init__(self, *links: AgentLinks) -> None:
        self._links = links

    async def send(self, node: str, message: ToAgent) -> None:
        for link in self._links:
            await link.send(node, message)

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        for link in self._links:
            await link.end(node, refusal, fatal=fatal)
