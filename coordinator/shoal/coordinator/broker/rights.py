"""Access rights at the broker in the terms of Mosquitto's dynamic-security plugin; values only.

A node publishes and reads its own topics. The coordinator has the opposite ends of all of them, and clears what they
retain. Everything else is denied: other nodes' topics, `#`, `$SYS`, shared subscriptions. Receiving needs no right of
its own, because nobody receives from a topic that nobody may subscribe to. The plugin has no working pattern for "its
own name" (it takes %u literally), so each node has a role to itself. Only whole filters are granted
(`subscribeLiteral`): with `subscribePattern` a `+` would be granted where the coordinator's own filters have one.
"""

from collections.abc import Iterable
from typing import Any, Final

from shoal.types import topics
from shoal.wire.identity import COORDINATOR_USER

CONTROL: Final = "$CONTROL/dynamic-security/v1"
RESPONSE: Final = "$CONTROL/dynamic-security/v1/response"
COORDINATOR_ROLE: Final = "coordinator"
_NODE: Final = "node."

Json = dict[str, Any]


def document(region: str, nodes: Iterable[str] = ()) -> Json:
    """The plugin's whole configuration when exactly these nodes are admitted."""
    admitted = [admission(region, node) for node in nodes]
    roles, clients = ([{**each[part]} for each in admitted] for part in (0, 1))
    for each in (*roles, *clients):
        del each["command"]
    return {
        "defaultACLAccess": {
            "publishClientSend": False,
            "publishClientReceive": True,
            "subscribe": False,
            "unsubscribe": True,
        },
        "clients": [{"username": COORDINATOR_USER, "roles": [{"rolename": COORDINATOR_ROLE}]}, *clients],
        "groups": [],
        "roles": [{"rolename": COORDINATOR_ROLE, "acls": coordinator_acls(region)}, *roles],
    }


def coordinator_acls(region: str) -> list[Json]:
    kept = sorted(topics.RETAINED - {*topics.DOWN})  # to clear what a removed node left there
    sent = [
        topics.region_online(region),
        *(topics.all_nodes(region, channel) for channel in (*topics.DOWN, *kept)),
        CONTROL,
    ]
    read = [*(topics.all_nodes(region, channel) for channel in topics.UP), RESPONSE]
    return [*_acls(sent, read), _acl("publishClientReceive", RESPONSE)]  # which no default covers


def node_acls(region: str, node: str) -> list[Json]:
    sent = [topics.of_node(region, node, channel) for channel in topics.UP]
    read = [topics.region_online(region), *(topics.of_node(region, node, channel) for channel in topics.DOWN)]
    return _acls(sent, read)


def role_of(node: str) -> str:
    """The name of a node's own role; never the coordinator's, whatever the node is called."""
    return f"{_NODE}{node}"


def node_of(role: str) -> str:
    """The node of that role; empty if it is no node's."""
    return role.removeprefix(_NODE) if role.startswith(_NODE) else ""


def admission(region: str, node: str) -> tuple[Json, ...]:
    """Commands that give `node` its rights; it has none before."""
    role = role_of(node)
    return (
        {"command": "createRole", "rolename": role, "acls": node_acls(region, node)},
        {"command": "createClient", "username": node, "roles": [{"rolename": role}]},
    )


def expulsion(node: str) -> tuple[Json, ...]:
    """Commands that end `node`'s connection and take away all its rights.

    Not `disableClient`: Mosquitto 2.0 checks whether a client is disabled only where it checks a password, so a
    disabled client with a certificate is let in again with all its rights.
    """
    return (
        {"command": "deleteClient", "username": node},
        {"command": "deleteRole", "rolename": role_of(node)},
    )


def _acls(sent: list[str], read: list[str]) -> list[Json]:
    return [*(_acl("publishClientSend", topic) for topic in sent), *(_acl("subscribeLiteral", topic) for topic in read)]


def _acl(kind: str, topic: str) -> Json:
    return {"acltype": kind, "topic": topic, "priority": 0, "allow": True}
