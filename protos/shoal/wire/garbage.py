"""Python's search for cycles among objects, kept short in processes that answer.

A full search looks at every object there is, while nothing else of the process runs. Most of them are modules, classes
and tables that live as long as it does: 56000 of a front's 58000, for which a search took 19 to 31 ms of a core, six
times in two minutes at 380 requests/s (measured). No request moved meanwhile.
"""

import gc


def set_apart() -> None:
    """All objects there are: no later search looks at them. Once, when a process is put together and before it serves;
    cycles among these that come apart later are not freed."""
    gc.collect()
    gc.freeze()
