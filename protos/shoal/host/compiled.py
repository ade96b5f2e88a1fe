"""Whether this installation runs compiled modules (docs/decisions/0038-compiled-transport.md)."""

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from typing import Final

TRANSPORT: Final = "shoal.http2.connection"
"""One of the modules of this distribution that `[tool.shoal.compiled]` lists: all are compiled, or none."""


def is_compiled(module: str = TRANSPORT) -> bool:
    """Whether a module is compiled, rather than Python that is interpreted."""
    spec = find_spec(module)
    return spec is not None and str(spec.origin).endswith(tuple(EXTENSION_SUFFIXES))
