"""Events that a node reports reach the region, whatever becomes of the session that carries them."""

import asyncio

import pytest
from simulation.scene import Scene, run_scenario

from shoal.simulator.parts.network import SimLinkSession
from shoal.types.codes import Code, refuse
from shoal.types.link import FromAgent, NodeEvents

FIRST, LATER = "cpu7", "cpu8"
"""Subjects of the two events."""


@pytest.mark.parametrize(("is_lost", "reported"), [(True, 1), (False, 0)])
def test_events_are_sent_again_after_a_lost_link_but_not_if_they_are_too_large(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool, reported: int
) -> None:
    failed = list[NodeEvents]()
    send = SimLinkSession.send

    async def scenario(scene: Scene) -> None:
        region, machine = scene.cluster.region, scene.replicas[0]
        listener = scene.cluster.network.listener
        assert region is not None
        assert listener is not None
        supervisor = scene.cluster.supervisors[machine.name]

        async def fail_once(self: SimLinkSession, message: FromAgent) -> None:
            if isinstance(message, NodeEvents) and not failed:
                failed.append(message)
                if not is_lost:
                    raise refuse(Code.TOO_LARGE, "the events", "what fits into a message")
                listener.sessions[machine.identity].on_server_left()
            await send(self, message)

        monkeypatch.setattr(SimLinkSession, "send", fail_once)
        supervisor.report_event(Code.NAME_DUPLICATE, FIRST, "two drivers offer it")
        await scene.until(lambda: failed, 10.0, "a send of the event")
        supervisor.report_event(Code.NAME_DUPLICATE, LATER, "two drivers offer it")
        subjects = list[str]()
        async with asyncio.timeout(20.0):
            async for event in region.events.follow(0):
                subjects.append(event.subject)
                if event.subject == LATER:
                    break
        assert subjects.count(FIRST) == reported

    run_scenario(1, 1, scenario)
    assert failed
