"""MQTT topics of the agent link: `shoal/v1/REGION/NODE/CHANNEL`, and `shoal/v1/REGION/online` of the coordinator.

Each channel carries messages in one direction only, so a broker's access rights are two lists. Any other topic is
refused, even where the broker let it through.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shoal.types.codes import Code, refuse
from shoal.types.identity import check_name

PREFIX: Final = "shoal/v1"


class Channel(StrEnum):
    """The last part of a node's topic."""

    HELLO = "hello"
    ONLINE = "online"
    CAPABILITY = "capability"
    STATUS = "status"
    WELCOME = "welcome"
    DESIRED = "desired"
    REQUEST = "request"


UP: Final = (Channel.HELLO, Channel.ONLINE, Channel.CAPABILITY, Channel.STATUS)
"""The node publishes, the coordinator reads."""
DOWN: Final = (Channel.WELCOME, Channel.DESIRED, Channel.REQUEST)
"""The coordinator publishes, the node reads."""
RETAINED: Final = frozenset({Channel.ONLINE, Channel.CAPABILITY, Channel.DESIRED})


@dataclass(frozen=True, slots=True)
class Topic:
    """A node's topic; `str` gives its form on the wire."""

    region: str
    node: str
    channel: Channel

    def __str__(self) -> str:
        return f"{PREFIX}/{self.region}/{self.node}/{self.channel}"


def region_online(region: str) -> str:
    """Topic where the region's coordinator announces its presence."""
    return f"{PREFIX}/{region}/online"


def of_node(region: str, node: str, channel: Channel) -> str:
    return str(Topic(region, node, channel))


def all_nodes(region: str, channel: Channel) -> str:
    """A subscription filter for this channel of every node."""
    return f"{PREFIX}/{region}/+/{channel}"


def parse(text: str, region: str, channels: tuple[Channel, ...]) -> Topic:
    """A node's topic in `region` on one of `channels`. Raises ShoalError(TOPIC_DENIED | NAME_INVALID)."""
    parts = text.split("/")
    if len(parts) != 5 or "/".join(parts[:2]) != PREFIX or parts[2] != region or parts[4] not in channels:
        raise refuse(
            Code.TOPIC_DENIED,
            f"{text!r:.120}",
            f"{PREFIX}/{region}/NODE/{{{','.join(channels)}}}",
            "look at the rights that the broker gives",
        )
    return Topic(region, check_name(parts[3], "node"), Channel(parts[4]))
