"""Who reads metrics: roles that may see every tenant, each connection apart from the others."""

import socket
import ssl
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from harness.crypto.pki import Authority, CertificateFiles
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.host import metrics_page
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire import metrics_access


@dataclass
class Page:
    port: int
    authority: Authority
    wall: float
    serve: Callable[[int], int] = lambda port: port
    """Serves it once more, at this port (0: any); the port."""

    def again(self) -> "Page":
        return replace(self, port=self.serve(0))

    def read(self, files: CertificateFiles | None) -> str:
        context = ssl.create_default_context(cafile=str(self.authority.issue(Role.COORDINATOR, "c").authority))
        if files is not None:
            context.load_cert_chain(files.certificate, files.key)
        with urllib.request.urlopen(f"https://localhost:{self.port}/metrics", context=context, timeout=5) as answer:
            return str(answer.read().decode())


@pytest.fixture
def page(tmp_path: Path) -> Page:
    now = SystemClock().wall()
    authority = Authority(tmp_path, "eu", now)
    own = authority.issue(Role.COORDINATOR, "coordinator")
    found = Page(0, authority, now)
    guard = metrics_access.RegionMetricsAccess(
        authority.region, own.certificate, own.key, own.authority, lambda: Wall(found.wall)
    )

    def application(environ: object, start_response: object) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])  # type: ignore[operator]
        return [b"shoal_up 1"]

    found.serve = lambda port: metrics_page.serve(application, "127.0.0.1", port, guard)
    found.port = found.serve(0)
    return found


@pytest.mark.parametrize("role", list(Role))
def test_only_roles_that_read_get_it(page: Page, role: Role) -> None:
    files = page.authority.issue(role, "somebody")
    if role in metrics_access.READERS:
        assert page.read(files) == "shoal_up 1"
        return
    with pytest.raises(HTTPError) as refused:
        page.read(files)
    assert refused.value.code == 403
    assert "ROLE_DENIED" in refused.value.read().decode()


def test_nobody_without_a_certificate_or_with_one_that_ended(page: Page) -> None:
    with pytest.raises((URLError, OSError)):
        page.read(None)
    operator = page.authority.issue(Role.OPERATOR, "ops")
    page.wall += 100 * 365 * 86400.0
    with pytest.raises(HTTPError) as refused:
        page.read(operator)
    assert refused.value.code == 403
    assert "CERT_EXPIRED" in refused.value.read().decode()


def test_a_silent_peer_holds_up_nobody(page: Page) -> None:
    operator = page.authority.issue(Role.OPERATOR, "ops")
    with socket.create_connection(("127.0.0.1", page.port)), socket.create_connection(("127.0.0.1", page.port)):
        assert page.read(operator) == "shoal_up 1"


def test_a24_many_silent_peers_hold_up_nobody(page: Page) -> None:
    """As many as the port takes, of the reader's own address and of another: the oldest end for who comes."""
    operator = page.authority.issue(Role.OPERATOR, "ops")
    held = [
        socket.create_connection(("127.0.0.1", page.port), source_address=(address, 0))
        for address in ("127.0.0.1", "127.0.0.2", "127.0.0.3")
        for _ in range(metrics_page.MAX_CONNECTIONS_PER_ADDRESS)
    ]
    for _ in range(3):
        assert page.read(operator) == "shoal_up 1"
    for each in held:
        each.close()


def test_a15_a_request_that_drips_has_the_time_of_one(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no progress: request and answer have their time together."""
    monkeypatch.setattr(metrics_page, "TIMEOUT_S", 0.5)
    dripped = page.again()
    operator = dripped.authority.issue(Role.OPERATOR, "ops")
    context = ssl.create_default_context(cafile=str(operator.authority))
    context.load_cert_chain(operator.certificate, operator.key)
    plain = socket.create_connection(("127.0.0.1", dripped.port))
    with context.wrap_socket(plain, server_hostname="localhost") as secured:
        secured.settimeout(0.02)

        def is_closed() -> bool:
            secured.send(b"G")
            try:
                return not secured.recv(1)
            except TimeoutError:
                return False

        with suppress(ConnectionError, ssl.SSLError):
            wait_until(is_closed, 5, "the page to close it")
    assert dripped.read(operator) == "shoal_up 1"


def test_a_port_that_is_taken_is_an_error(page: Page) -> None:
    with pytest.raises(OSError):
        page.serve(page.port)


def test_a_late_page_is_made_once_with_the_first_scrape() -> None:
    made: list[int] = []

    def make() -> metrics_page.WsgiApp:
        made.append(1)
        return lambda environ, start_response: [b"shoal_up 1"]

    page = metrics_page.late_page(make)
    assert made == []
    assert [page({}, print), page({}, print)] == [[b"shoal_up 1"]] * 2
    assert made == [1]
