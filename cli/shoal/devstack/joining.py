"""Regions in their federation, once coordinators serve. For processes on this machine and for containers alike."""

import time
from collections.abc import Callable, Mapping
from typing import Final

from shoal.client import TOKEN_S, Region
from shoal.devstack import layout
from shoal.types.codes import Code, refuse
from shoal.v1.operator_pb2 import Document, FederationView

Say = Callable[[str], None]
ACQUAINTED_WITHIN_S: Final = 60.0


def federate(federation: Region, doors: str, apis: Mapping[str, Region], say: Say) -> None:
    """Every region a member that works for all the others; one that is, from an earlier start, stays as it is. Returns
    when each knows all of them. federation, apis (by region): as operators. Raises ShoalError."""
    for name, api in apis.items():
        if api.federation() is None:
            say(f"{name} joins the federation")
            api.join_federation(doors, federation.create_token("region", name, TOKEN_S).token)
            api.apply([Document(name=f"{name}.yaml", text=layout.TRADING.format(region=name))])

    def acquainted() -> bool:
        views = [api.federation() for api in apis.values()]
        return all(view is not None and _knows(view, len(apis)) for view in views)

    wait(acquainted, ACQUAINTED_WITHIN_S, "every region to know the others")


def _knows(view: FederationView, count: int) -> bool:
    """Whether a region lists so many, and what they have free."""
    return len(view.members) == count and all(member.advertises for member in view.members)


def wait(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Raises ShoalError(DEADLINE_EXCEEDED)."""
    end = time.monotonic() + limit_s  # noqa: TID251 - a command's own deadline
    while not condition():
        if time.monotonic() > end:  # noqa: TID251
            remedy = "read the logs: `shoal dev status -o json` names them, `docker compose logs` shows them"
            raise refuse(Code.DEADLINE_EXCEEDED, f"not within {limit_s:g}s", what, remedy)
        time.sleep(0.1)  # noqa: TID251
