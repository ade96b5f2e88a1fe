"""The public half of the key with which this node's front signs forwarded requests."""

import hashlib
import json
from pathlib import Path

from shoal.agent.identity.orders import ForwardKeyOrder
from shoal.agent.identity.programs import run_order
from shoal.types.codes import Code, refuse


def public_file(path: Path) -> Path:
    """File beside the private key: its public half, and of which bytes it is that."""
    return path.with_suffix(".public.json")


def public_key_of(path: Path) -> str:
    """The public key, hex, of the private one at `path`, which is made if missing. Blocking. Raises ShoalError."""
    known = _read_public(path)
    if known is None:
        run_order(ForwardKeyOrder(str(path)))
        known = _read_public(path)
    if known is None:
        raise refuse(Code.STATE_CORRUPT, f"{path.name} changes while it is read", "one agent's key", "start it again")
    return known


def _read_public(path: Path) -> str | None:
    """None: there is no key, or nothing is known of this one."""
    try:
        known = json.loads(public_file(path).read_bytes())
        of, public = known["of"], known["public"]
        private = path.read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return public if isinstance(public, str) and of == hashlib.sha256(private).hexdigest() else None
