"""HOST:PORT: which texts are addresses, and that joining is the inverse of splitting."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.main import options as agent_options
from shoal.coordinator.main.options import config_of, parser_of
from shoal.coordinator.ports import StoreOptions
from shoal.coordinator.store.etcd.options import EtcdOptions
from shoal.types.address import HostPort, parse_host
from shoal.types.codes import Code, ShoalError

HOSTS = st.one_of(
    st.from_regex(r"[a-z0-9_]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)


@given(HOSTS, st.integers(0, 65535))
def test_an_address_is_read_as_it_was_written(host: str, port: int) -> None:
    address = HostPort(host, port)
    assert HostPort.parse(str(address)) == address
    assert ("[" in str(address)) is (":" in host)
    assert parse_host(host) == host


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("[::1]:7444", "::1", 7444),
        ("[2001:db8::7]:1", "2001:db8::7", 1),
        ("[::ffff:10.0.0.1]:80", "::ffff:10.0.0.1", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ("edge-coordinator:7443", "edge-coordinator", 7443),
        ("127.0.0.1:0", "127.0.0.1", 0),
    ],
)
def test_an_ipv6_address_stands_in_brackets(text: str, host: str, port: int) -> None:
    assert HostPort.parse(text) == HostPort(host, port)
    assert str(HostPort(host, port)) == text


NO_ADDRESSES = (
    "", "a", "a:", ":1", "a:65536", "a:-1", "a:\N{SUPERSCRIPT TWO}", "a:1\n", "a b:1", "-a:1", "a/b:1",
    "http://a:1", "a:1,b:1",
    "::1:7444", "::1", "[::1]", "[::1]7444", "[::1", "::1]:7444", "[::g]:1", "[a]:1", "[127.0.0.1]:1", "[]:1",
    "[fe80::1%]:1", "[fe80::1%a/b]:1",
)  # fmt: skip


@pytest.mark.parametrize("text", NO_ADDRESSES)
def test_anything_else_is_refused_with_a_code(text: str) -> None:
    with pytest.raises(ShoalError, match="what the user typed") as refused:
        HostPort.parse(text, "what the user typed")
    assert refused.value.code is Code.FIELD_INVALID
    assert "[::1]:7443" in refused.value.refusal.remedy


@pytest.mark.parametrize(("text", "host"), [("[::1]", "::1"), ("::1", "::1"), ("10.0.0.7", "10.0.0.7"), ("a.b", "a.b")])
def test_a_host_alone_may_have_its_brackets(text: str, host: str) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize("text", ["", "a:1", "[::1]:1", "[a]", "::g", "a b", "10.0.0.7/8"])
def test_what_is_no_host_is_refused_with_a_code(text: str) -> None:
    with pytest.raises(ShoalError) as refused:
        parse_host(text)
    assert refused.value.code is Code.FIELD_INVALID


def coordinator_of(*flags: str) -> Any:
    return config_of(parser_of({}).parse_args(["run", *flags]))


def agent_of(*flags: str) -> Any:
    return agent_options.make_config(agent_options.parser().parse_args(["run", *flags]))


LISTENERS = ("listen", "front-metrics")
COORDINATOR_FLAGS = ("--link", "--enrol", "--metrics", "--models", "--peers", "--mqtt", "--links", "--enrols")
AGENT_FLAGS = (*(f"--{name}" for name in LISTENERS), "--metrics", "--health", "--coordinator", "--mqtt", "--enrol")


def test_a_coordinator_tells_its_ipv6_address_in_brackets() -> None:
    config = coordinator_of("--link", "[::1]:7443", "--links", "[::1]:7443,[::2]:7443", "--mqtt", "[::1]:8883")
    assert (config.link, config.advertise) == (HostPort("::1", 7443), "::1")
    assert (config.links, str(config.mqtt)) == ("[::1]:7443,[::2]:7443", "[::1]:8883")
    assert coordinator_of("--advertise", "[2001:db8::7]").advertise == "2001:db8::7"


def test_an_agent_listens_at_ipv6_and_tells_so() -> None:
    config = agent_of(*(each for name in LISTENERS for each in (f"--{name}", "[::1]:0")), "--advertise", "[::2]")
    assert (config.listen, config.advertise) == (HostPort("::1", 0), "::2")
    assert str(config.listen) == "[::1]:0"


@pytest.mark.parametrize(
    "flag", ["--link", "--enrol", "--metrics", "--models", "--peers", "--mqtt", "--links", "--enrols"]
)
def test_a_coordinator_refuses_a_wrong_address_by_its_flag(flag: str) -> None:
    with pytest.raises(ShoalError, match=f"{flag} '::1:7443'") as refused:
        coordinator_of(flag, "::1:7443")
    assert refused.value.code is Code.FIELD_INVALID


@pytest.mark.parametrize(
    "flag",
    [
        "--listen",
        "--metrics",
        "--front-metrics",
        "--health",
        "--coordinator",
        "--mqtt",
        "--enrol",
    ],
)
def test_an_agent_refuses_a_wrong_address_by_its_flag(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        agent_of(flag, "::1:7443")
    said = capsys.readouterr().err
    assert said.startswith(f"found: {flag}: address '::1:7443'; wanted: HOST:PORT")
    assert said.endswith(f"({Code.USAGE})\n")


def test_etcd_may_be_at_ipv6() -> None:
    given = {"endpoints": "[::1]:2379, etcd-1:2379", "ca": "ca", "cert": "cert", "key": "key"}
    options = EtcdOptions.parse(StoreOptions(Path("data"), "region/eu", given))
    assert options.endpoints == ("[::1]:2379", "etcd-1:2379")
