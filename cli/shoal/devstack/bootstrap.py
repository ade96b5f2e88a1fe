"""Joins regions to their federation once coordinators serve, whether as processes on this machine or in containers."""

import time
from collections.abc import Callable, Mapping
from typing import Final

from shoal.client import TOKEN_S, RegionClient
from shoal.devstack import layout
from shoal.types.codes import Code, refuse
from shoal.v1.operator_pb2 import Document, FederationView

Say = Callable[[str], None]
DIRECTORY_WITHIN_S: Final = 60.0


def federate(federation: RegionClient, enrol_addresses: str, apis: Mapping[str, RegionClient], say: Say) -> None:
    """Make every region a member that works for all the others; members of an earlier start stay as they are.

    Returns when each region knows all of them. federation, apis (by region): as operators. Raises ShoalError.
    """
    for name, api in apis.items():
        if api.federation() is None:
            say(f"{name} joins the federation")
            api.join_federation(enrol_addresses, federation.create_token("region", name, TOKEN_S).token)
            api.apply([Document(name=f"{name}.yaml", text=layout.TRADE_DOCUMENT.format(region=name))])

    def know_each_other() -> bool:
        views = [api.federation() for api in apis.values()]
        return all(view is not None and _lists_all(view, len(apis)) for view in views)

    wait(know_each_other, DIRECTORY_WITHIN_S, "every region to know the others")


def _lists_all(view: FederationView, count: int) -> bool:
    """Whether a region lists `count` regions with their free capacity."""
    return len(view.members) == count and all(member.advertises for member in view.members)


def wait(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Raises ShoalError(DEADLINE_EXCEEDED)."""
    end = time.monotonic() + limit_s  # noqa: TID251 - a command's own deadline
    while not condition():
        if time.monotonic() > end:  # noqa: TID251
            remedy = "read the logs: `shoal dev status -o json` names them, `docker compose logs` shows them"
            raise refuse(Code.DEADLINE_EXCEEDED, f"not within {limit_s:g}s", what, remedy)
        time.sleep(0.1)  # noqa: TID251
