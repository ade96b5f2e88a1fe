"""Imports a library without the optional ones that it would import where they are installed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Inside, modules of these names count as not installed, unless they are imported already. In `sys.modules`, None
    makes the import of a name fail (Python's reference, 5.3.1)."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # its stub knows modules alone
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
