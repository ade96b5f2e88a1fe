"""`python -m generators` writes every page of the reference that comes from the code."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from generators import (
    codes,
    command_line,
    configuration,
    decisions,
    events,
    exit_codes,
    grpc,
    log_events,
    metrics,
    policy,
    rest,
)

DOCS: Final = Path(__file__).parents[1]

PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "reference/policy.md": policy.policy,
    "reference/codes.md": codes.codes,
    "reference/command-line.md": command_line.command_line,
    "reference/exit-codes.md": exit_codes.exit_codes,
    "reference/configuration.md": configuration.configuration,
    "reference/events.md": events.events,
    "reference/log-events.md": log_events.log_events,
    "reference/metrics.md": metrics.metrics,
    "reference/rest.md": rest.rest_methods,
    "decisions/README.md": decisions.decisions,
    **grpc.pages(),
}
"""Path below docs -> what writes it."""


def main() -> None:
    for name, write in PAGES.items():
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(write())


if __name__ == "__main__":
    main()
