"""How many files and connections this process may have open."""

import resource


def raise_limit() -> None:
    """To as many as the machine allows it: a server that runs out of them takes no new connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
