"""The page of reason codes."""

from collections.abc import Iterator

from generators.markdown import GENERATED, code, page, table
from shoal.types.code_help import CODE_GROUPS
from shoal.wire.status import grpc_status, http_status

_HEAD = f"""# Reason codes

{GENERATED}

Every refusal and every wait has a stable code: in the command line, the API, logs, metrics and the
audit log. A code is never renamed or reused. A refusal also says what was found, what was wanted,
and what to try in that case. This page says what holds in every case.

A request that is refused carries its code in the trailer `shoal-code` (gRPC) or in the body (REST),
beside the status that is named here.
"""


def codes() -> str:
    return page(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    for title, group in CODE_GROUPS.items():
        yield f"## {title}"
        yield ""
        rows = [
            (
                f'<a id="{each.lower()}"></a>{code(each)}',
                text.cause,
                text.cure,
                f"{grpc_status(each).name} {http_status(each)}",
            )
            for each, text in group.items()
        ]
        yield from table(("code", "cause", "cure", "status"), rows)
