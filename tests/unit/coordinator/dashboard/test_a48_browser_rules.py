"""A48: a request that another site caused, or that names another host, is refused; frames and inline scripts are."""

import pytest

from shoal.coordinator.api.dashboard.browser_rules import SECURITY_HEADERS, cookie_of, host_refusal, site_refusal
from shoal.types.codes import Code

HOSTS = frozenset({"coordinator.example", "10.0.0.7", "fd00::7"})
OWN = {"host": "coordinator.example:7448"}


@pytest.mark.parametrize(
    "host",
    [
        "coordinator.example:7448", "Coordinator.Example", "10.0.0.7:7448", "[fd00::7]:7448", "[FD00::7]",
        "127.0.0.1:40001", "localhost:40001", "[::1]:1", "coordinator.example.:7448",
    ],
)  # fmt: skip
def test_a_host_that_is_ours_is_let_in(host: str) -> None:
    assert host_refusal({"host": host}, HOSTS) is None


@pytest.mark.parametrize(
    "host",
    [
        "", "evil.example", "evil.example:7448", "coordinator.example.evil.example", "10.0.0.8:7448",
        "127.0.0.1.evil.example", "coordinator.example@evil.example", "localhost:x", "[::1", "::1]", "a b",
        "127.0.0.1:7448:7448", "\x00",
    ],
)  # fmt: skip
def test_another_name_that_points_here_is_refused(host: str) -> None:
    refusal = host_refusal({"host": host}, HOSTS)
    assert refusal is not None
    assert refusal.code is Code.ROLE_DENIED


@pytest.mark.parametrize(
    ("method", "headers", "is_page"),
    [
        ("GET", {}, False),  # not a browser
        ("GET", {"sec-fetch-site": "same-origin"}, False),
        ("GET", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, True),  # typed, or from a mail
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, True),
        ("POST", {"origin": "https://coordinator.example:7448", "content-type": "application/json"}, False),
        ("POST", {"origin": "http://coordinator.example:7448", "content-type": "application/yaml"}, False),
    ],
)
def test_its_own_page_is_let_in(method: str, headers: dict[str, str], is_page: bool) -> None:
    assert site_refusal(method, OWN | headers, is_page=is_page) is None


@pytest.mark.parametrize(
    ("method", "headers", "is_page"),
    [
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, False),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, False),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, False),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, True),
        ("GET", {"sec-fetch-site": "same-origin", "sec-fetch-dest": "iframe"}, True),
        ("GET", {"sec-fetch-site": "same-origin", "sec-fetch-dest": "object"}, True),
        ("GET", {"origin": "https://evil.example"}, False),
        ("GET", {"origin": "null"}, False),
        ("POST", {"origin": "https://coordinator.example", "content-type": "application/json"}, False),  # another port
        ("POST", {"origin": "https://evil.example", "content-type": "application/json"}, False),
        (
            "POST",
            {"origin": "https://coordinator.example:7448@evil.example", "content-type": "application/json"},
            False,
        ),
        ("POST", {"origin": "https://coordinator.example:7448", "content-type": "text/plain"}, False),
        ("POST", {"content-type": "application/x-www-form-urlencoded"}, False),
        ("POST", {}, False),
    ],
)
def test_what_another_site_caused_is_refused(method: str, headers: dict[str, str], is_page: bool) -> None:
    refusal = site_refusal(method, OWN | headers, is_page=is_page)
    assert refusal is not None
    assert refusal.code is Code.ROLE_DENIED


def test_the_page_may_run_its_own_files_alone_and_in_no_frame() -> None:
    policy = dict(part.split(" ", 1) for part in SECURITY_HEADERS["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in SECURITY_HEADERS["content-security-policy"]
    assert SECURITY_HEADERS["x-frame-options"] == "DENY"
    assert SECURITY_HEADERS["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("header", "value"),
    [("s=1", "1"), ("a=2; s=1", "1"), ("s=1; s=2", "1"), ("xs=1", ""), ("s", ""), ("", ""), ("s=a=b", "a=b")],
)
def test_a_cookie_is_found_by_its_exact_name(header: str, value: str) -> None:
    assert cookie_of({"cookie": header}, "s") == value
