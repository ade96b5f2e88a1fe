"""Files that only their owner reads, replaced as a whole: keys, tokens, records with nonces; and no dumps of them."""

import os
import resource
from pathlib import Path


def write_private(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replaces `path` by a file of mode 0600: a reader finds the old content or the new, never half.

    durable: on disk when this returns; what does not outlive its process may do without. Raises OSError.
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


def no_dumps() -> None:
    """A crash of this process, or of one that it starts, leaves no core file: its memory holds keys and inputs."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
