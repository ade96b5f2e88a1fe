"""A leader that hears from another coordinator that it was replaced."""

import asyncio
from pathlib import Path

import pytest

from harness.crypto.pki import Authority
from harness.servers.api_stub import api_stubs
from harness.wait import until
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.peers import siblings
from shoal.types.device import Role
from shoal.wire.member_files import Enrolled


async def test_a_leader_of_a_later_term_replaces_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three answer: one that follows, one that leads in the same term, then in the next. One is gone, and one is
    named as hosts in a compose file may be, and other regions' coordinators may not."""
    monkeypatch.setattr(siblings, "EVERY_S", 0.02)
    clock = CoordinatorClock()
    authority = Authority(tmp_path / "pki", "eu", clock.wall())
    certificate, key, ca = authority.issue(Role.COORDINATOR, "coordinator").read()
    own = Enrolled("eu", Role.COORDINATOR, "coordinator", certificate, ca, "", "", key)
    with api_stubs(authority, tmp_path / "ann") as (gone, leader, follower):
        gone.server.stop(None).wait()
        addresses = (*leader.coordinators, "coordinator_2:7443")
        asked = siblings.Siblings("eu", addresses, lambda: (ca.decode(),), lambda: own, clock)
        waiting = asyncio.create_task(asked.wait_for_later_term(leader.term))
        try:
            before = leader.who_am_i_calls
            await until(
                lambda: leader.who_am_i_calls > before + 3 and follower.who_am_i_calls > 3,
                10.0,
                "both were asked again",
            )
            assert not waiting.done()
            leader.term += 1
            await asyncio.wait_for(waiting, 10.0)
        finally:
            waiting.cancel()
            await asked.close()
