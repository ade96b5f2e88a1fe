"""Logs of devices whose links the broker carries."""

import json

import pytest
from integration.mqtt.region import NODES

from harness.cluster.stack import DevStack
from shoal.types.codes import Code, ShoalError


def test_a_nodes_log_comes_by_the_broker_and_goes_on(stack: DevStack) -> None:
    with stack.api() as api:
        for node in NODES:
            told = [json.loads(text) for text in api.logs(node, lines=1000)]
            stamps = [each["timestamp"] for each in told]
            assert stamps == sorted(stamps)
            assert {"supervisor", "front"} <= {each["process"] for each in told}, node
            following = api.logs(node, lines=1, follow=True)
            assert json.loads(next(following))["timestamp"] == stamps[-1]
        with pytest.raises(ShoalError) as refused:
            list(api.logs("nobody"))
        assert refused.value.code is Code.NODE_UNKNOWN
