"""Topic names: what is ours parses, everything else is refused by a code."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.types import topics
from shoal.types.codes import Code, ShoalError
from shoal.types.topics import DOWN, UP, Channel

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)


@given(region=NAMES, node=NAMES, channel=st.sampled_from(Channel))
def test_what_is_written_is_read_back(region: str, node: str, channel: Channel) -> None:
    text = topics.of_node(region, node, channel)
    assert topics.parse(text, region, UP + DOWN) == topics.Topic(region, node, channel)


def test_each_channel_goes_one_way() -> None:
    assert set(UP) | set(DOWN) == set(Channel)
    assert not set(UP) & set(DOWN)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "shoal/v1/eu/edge-1",
        "shoal/v1/eu/edge-1/status/more",
        "shoal/v1/us/edge-1/status",
        "shoal/v2/eu/edge-1/status",
        "shoal/v1/eu/edge-1/desired",
        "shoal/v1/eu/edge-1/Status",
        "/shoal/v1/eu/edge-1/status",
        "$SYS/broker/uptime",
        "$share/g/shoal/v1/eu/edge-1/status",
        "shoal/v1/eu/online",
    ],
)
def test_a17_a_topic_that_no_node_may_publish_is_denied(text: str) -> None:
    with pytest.raises(ShoalError) as caught:
        topics.parse(text, "eu", UP)
    assert caught.value.code is Code.TOPIC_DENIED


@pytest.mark.parametrize(
    "node", ["+", "#", "..", "", "Edge", "edge-1.", "edge%2d1", "ed\0ge", "-a", "a-", "ｅdge", "e" * 64]
)
def test_a05_a_node_that_cannot_be_called_so(node: str) -> None:
    with pytest.raises(ShoalError) as caught:
        topics.parse(f"shoal/v1/eu/{node}/status", "eu", UP)
    assert caught.value.code is Code.NAME_INVALID


@given(st.text(max_size=80))
def test_any_text_is_ours_or_refused(text: str) -> None:
    try:
        found: str | Code = str(topics.parse(text, "eu", UP))
    except ShoalError as error:
        found = error.code
    assert found in (text, Code.TOPIC_DENIED, Code.NAME_INVALID)
