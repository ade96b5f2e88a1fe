"""Files that only their owner reads, replaced atomically: keys, tokens, records with nonces. Also disables core
dumps."""

import os
import resource
from pathlib import Path


def write_private(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replaces `path` by a file of mode 0600. A reader finds the old content or the new, never a part.

    durable: the content is on disk when this returns; not needed for files that end with their process. Raises OSError.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    beside.replace(path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def disable_core_dumps() -> None:
    """Prevents core files of this process and of those that it starts, because its memory holds keys and inputs."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
