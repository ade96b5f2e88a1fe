"""What workers cannot be kept from on this machine: for the doctors, who tell people.

Apart from `isolation`, which each worker runs, since a supervisor asks too."""

from shoal.agent.worker.groups import Groups
from shoal.wire import sandbox


def lacking() -> tuple[str, ...]:
    """In words, for people; empty when every worker is confined in every way. Only for a process with one thread."""
    return (*sandbox.lacking(), *Groups.find().lacking)
