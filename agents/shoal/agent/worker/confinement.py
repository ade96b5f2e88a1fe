"""Restrictions that this machine cannot impose on workers; the doctors report them.

Separate from `isolation`, which runs in each worker, because a supervisor asks too.
"""

from shoal.agent.worker.cgroups import Cgroups
from shoal.host import sandbox


def unsupported_restrictions() -> tuple[str, ...]:
    """As text for people. Empty if every worker is fully confined. Only for a process with one thread."""
    return (*sandbox.unsupported_restrictions(), *Cgroups.detect().unsupported_limits)
