"""What a worker that was taken over may say: its supervisor refuses what no message to the region can hold."""

import json
from typing import Any

import pytest

from shoal.agent.packing import unpack
from shoal.agent.worker.messages import WorkerReport
from shoal.types.codes import Code, ShoalError

STATUS: dict[str, Any] = {
    "assignment": "a-1", "state": "ready", "in_flight": 0, "served": [], "loaded": None, "refusal": None,
}  # fmt: skip


def make_report(**changed: object) -> WorkerReport:
    return unpack(WorkerReport, json.dumps({"held": [{**STATUS, **changed}]}).encode())


def test_what_it_says_is_read() -> None:
    assert make_report(in_flight=3).held[0].in_flight == 3
    assert make_report(assignment="ä").held[0].assignment == "ä"
    assert not make_report().measuring, "a worker of the version before says nothing of it"


@pytest.mark.parametrize("changed", [{"in_flight": 2**63}, {"in_flight": "3"}, {"assignment": "\ud800"}])
def test_what_it_may_not_say_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ShoalError) as refused:
        make_report(**changed)
    assert refused.value.code is Code.MESSAGE_INVALID
