"""When receipts are sent: a signature is waited for by no status."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from harness.builders import agent_values
from harness.fakes.clock import ManualClock
from harness.fakes.log import RecordingLog
from harness.wait import until
from shoal.agent.supervisor.status_reporter import StatusReporter
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.receipt import Receipt, SignedReceipt

HELD = (agent_values.receipt(agent_values.CPU),)


class SlowSigner:
    """Answers once `go` is set, and from then on at once."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.calls = 0
        self.fails: ShoalError | None = None

    async def sign_receipts(self, receipts: Sequence[Receipt]) -> tuple[SignedReceipt, ...]:
        self.calls += 1
        if not self.go.is_set():
            await self.go.wait()
        if self.fails is not None:
            raise self.fails
        return tuple(SignedReceipt(each, b"content", b"now") for each in receipts)


class Scene:
    """A reporter whose node has one receipt, and one session."""

    def __init__(self) -> None:
        self.signer, self.log, self.sent = SlowSigner(), RecordingLog(), list[Any]()
        self.signed = asyncio.Event()
        ports = SimpleNamespace(clock=ManualClock(), membership=None, signer=self.signer, log=self.log)
        self.reporter = StatusReporter(
            *cast(
                Any, (None, ports, SimpleNamespace(front_stats=None), None, SimpleNamespace(receipts=HELD), None, None)
            ),
            on_signed=self.signed.set,
        )

    async def send(self, message: object) -> None:
        self.sent.append(message)

    def session(self) -> Any:
        return SimpleNamespace(receipts=(), session=self)


async def test_a_heartbeat_does_not_wait_for_a_signature() -> None:
    scene = Scene()
    link = scene.session()
    for _ in range(3):
        await scene.reporter.send_receipts(link)
    assert (scene.sent, scene.signer.calls) == ([], 1)
    scene.signer.go.set()
    await asyncio.wait_for(scene.signed.wait(), 5.0)
    scene.signed.clear()
    await scene.reporter.send_receipts(link)
    assert [each.signature for each in scene.sent[0].receipts] == [b"now"]
    await scene.reporter.send_receipts(link)
    assert len(scene.sent) == 1, "once in a session"
    await scene.reporter.send_receipts(scene.session())
    assert len(scene.sent) == 2, "at once in the next one"
    assert not scene.signed.is_set()


async def test_a_signature_that_fails_is_tried_again_at_the_next_heartbeat() -> None:
    scene = Scene()
    scene.signer.fails = refuse(Code.INTERNAL, "no program", "an answer", "look")
    scene.signer.go.set()
    link = scene.session()
    await scene.reporter.send_receipts(link)
    scene.signer.go.clear()
    await scene.reporter.send_receipts(link)
    scene.signer.go.set()
    await until(lambda: len(scene.log.events) == 2, 5.0, "both are told")
    assert (scene.sent, scene.signed.is_set()) == ([], False)
    assert set(scene.log.events) == {"receipts_not_signed"}
    scene.signer.fails = None
    await scene.reporter.send_receipts(link)
    assert len(scene.sent) == 1
