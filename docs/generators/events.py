"""The page of a region's events."""

from collections.abc import Iterator

from generators.markdown import GENERATED, code, page, table
from shoal.types.event_help import EVENT_GROUPS

_HEAD = f"""# Events

{GENERATED}

Every decision of a region is an entry of its event log: `shoal events`, `shoal events -w` to follow
them, `-o json` for programs. An entry has a time, a sequence number, who caused it, and what it is
about: a node, a workload, an assignment or a move. It is named by an event of this page, or by a
[reason code](codes.md) where it tells of a refusal or a wait. What the programs write to their logs
is something else: [log events](log-events.md).
"""


def events() -> str:
    return page(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    for title, group in EVENT_GROUPS.items():
        yield f"## {title}"
        yield ""
        yield from table(("event", "meaning"), [(code(name), text) for name, text in group.items()])
