"""Checks what a hello claims, on either link."""

from shoal.types.codes import Code, refuse
from shoal.types.identity import Identity
from shoal.types.link import Hello


def check_hello(hello: Hello, identity: Identity) -> None:
    """A node may speak only for itself: its hello must name the identity in its certificate. Raises
    ShoalError(NODE_MISMATCH)."""
    node = hello.node
    if (node.region, node.role, node.name) != (identity.region, identity.role, identity.name):
        raise refuse(
            Code.NODE_MISMATCH,
            f"a hello of shoal://{node.region}/{node.role}/{node.name}",
            identity.uri,
            "a node speaks for itself only",
        )
