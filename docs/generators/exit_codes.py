"""The page of exit codes."""

from collections.abc import Iterator

from generators.markdown import GENERATED, code, page, table

EXIT_CODES = {
    0: "Done, or a question answered with yes.",
    1: "Answered with no: `validate` found problems, `can-move` says no, `doctor` found a failure, `plan` has changes "
    "to make, a benchmark or the demo failed.",
    2: "The command line cannot be read (`USAGE`).",
    130: "Interrupted (Ctrl-C).",
    141: "The reader of a pipe ended first.",
    255: "Refused or failed; the reason, with its code, is on standard error.",
}
"""Status -> when `shoal` ends with it."""

_HEAD = f"""# Exit codes

{GENERATED}

Scripts can rely on these. The reason is on standard error, as a sentence or, with `-o json`, as an
object with the fields `code`, `found`, `wanted` and `try`.

## shoal
"""

_REST = """## shoal-agent and shoal-coordinator

`0` after SIGTERM or a command that is done; `1` for a refusal, whose reason is on standard error;
`2` for a command line that cannot be read. A service manager starts both again after any other
status: the units in `deploy/systemd` do.
"""


def exit_codes() -> str:
    return page(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    yield from table(("status", "meaning"), [(code(status), text) for status, text in EXIT_CODES.items()])
    yield _REST
