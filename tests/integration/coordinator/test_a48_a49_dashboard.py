"""A48: the dashboard's port of a real coordinator, asked as no browser of an operator would ask. And A49."""

import http.client
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.cluster.coordinator import REGION, CoordinatorServer, operator
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.v1 import operator_pb2
from shoal.wire.member_files import Enrolled

READERS = {Role.OPERATOR, Role.VIEWER}
COOKIE = f"__Host-shoal-{REGION}"
PATHS = ("session", "live?tables=nodes", "get?kind=nodes", "explain?name=w", "history?name=w", "can-move?name=w&to=n",
         "trace?id=t")  # fmt: skip


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["code"])


def connect(coordinator: CoordinatorServer, caller: Enrolled | None, folder: Path) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cadata=coordinator.admin().ca_pem.decode())
    if caller is not None:
        files = folder / f"{caller.role}-{caller.name}"
        caller.write(files)
        context.load_cert_chain(files / "cert.pem", files / "key.pem")
    host, _, port = coordinator.dashboard.rpartition(":")
    return http.client.HTTPSConnection(host, int(port), timeout=10, context=context)


@pytest.fixture
def ask(coordinator: CoordinatorServer, tmp_path: Path) -> Any:
    def call(
        path: str, *, caller: Enrolled | None = None, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> Reply:
        connection = connect(coordinator, caller, tmp_path)
        connection.putrequest(method, path, skip_host="host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        reply = connection.getresponse()
        is_stream = reply.status == 200 and "event-stream" in reply.getheader("content-type", "")
        read = b"" if is_stream else reply.read()
        connection.close()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, read)

    return call


def link_of(coordinator: CoordinatorServer) -> str:
    opened = operator(coordinator.link, coordinator.admin()).OpenDashboard(
        operator_pb2.OpenDashboardRequest(), timeout=10
    )
    assert opened.address == coordinator.dashboard
    return str(opened.secret)


def log_in(ask: Any, link: str, **headers: str) -> Reply:
    body = json.dumps({"link": link}).encode()
    found: Reply = ask("/api/v1/login", method="POST", body=body, **{"content_type": "application/json", **headers})
    return found


def session_of(reply: Reply) -> str:
    return reply.headers["set-cookie"].partition(";")[0]


def test_a48_nobody_reads_without_a_login_and_a_session_cannot_be_guessed(
    coordinator: CoordinatorServer, ask: Any
) -> None:
    for path in PATHS:
        for cookie in ("", f"{COOKIE}=", f"{COOKIE}={'A' * 27}", f"other={link_of(coordinator)}"):
            refused = ask(f"/api/v1/{path}", **({"cookie": cookie} if cookie else {}))
            assert (refused.status, refused.code) == (401, Code.UNAUTHENTICATED), path
    refused = ask("/api/v1/plan", method="POST", body=b"kind: Policy", content_type="application/yaml")
    assert refused.status == 401
    assert ask("/").status == 200, "the page itself shows nothing of the region"


def test_a48_each_role_reads_or_is_refused(coordinator: CoordinatorServer, ask: Any) -> None:
    callers = [role for role in Role if role is not Role.BROKER]
    for role in callers:
        caller = coordinator.certificate(role, "someone")
        for path in PATHS:
            reply = ask(f"/api/v1/{path}", caller=caller)
            if role in READERS:
                assert reply.status in (200, 404), (role, path, reply)
            else:
                assert (reply.status, reply.code) == (403, Code.ROLE_DENIED), (role, path)
    record("A48", "P", len(callers) * len(PATHS), listener="dashboard")


def test_a48_a_link_logs_in_once_and_the_cookie_stays_here(coordinator: CoordinatorServer, ask: Any) -> None:
    link = link_of(coordinator)
    opened = log_in(ask, link)
    assert opened.status == 204
    assert {"Secure", "HttpOnly", "SameSite=Strict", "Path=/"} <= set(opened.headers["set-cookie"].split("; "))
    told = ask("/api/v1/session", cookie=session_of(opened))
    assert json.loads(told.body)["role"] == Role.OPERATOR
    assert (log_in(ask, link).status, log_in(ask, "guess").status) == (401, 401)
    out = ask("/api/v1/logout", method="POST", body=b"{}", cookie=session_of(opened), content_type="application/json")
    assert out.status == 204
    assert ask("/api/v1/session", cookie=session_of(opened)).status == 401


def test_a48_another_site_another_host_and_frames_are_refused(coordinator: CoordinatorServer, ask: Any) -> None:
    cookie = session_of(log_in(ask, link_of(coordinator)))
    for headers in (
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "cors"},
        {"origin": "https://evil.example"},
        {"host": "evil.example"},
        {"host": f"evil.example:{coordinator.dashboard.rpartition(':')[2]}"},
    ):
        refused = ask("/api/v1/get?kind=nodes", cookie=cookie, **headers)
        assert (refused.status, refused.code) == (403, Code.ROLE_DENIED), headers
    assert log_in(ask, link_of(coordinator), origin="https://evil.example").status == 403
    assert ask("/", sec_fetch_dest="iframe", sec_fetch_site="cross-site", sec_fetch_mode="navigate").status == 403
    page = ask("/")
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-frame-options"] == "DENY"
    for path in ("/", "/api/v1/session", "/nothing"):
        assert "script-src 'self'" in ask(path).headers["content-security-policy"], path


def test_a49_no_path_leads_out_of_the_page(coordinator: CoordinatorServer, ask: Any) -> None:
    paths = (
        "/assets/../server.py", "/assets/..%2fserver.py", "/assets/%2e%2e/server.py", "/assets/build.json%00",
        "/assets//etc/passwd", "//etc/passwd", "/assets/", "/assets/build.json", "/../../etc/passwd",
        "/assets/index.html/", "/api/v1/../../assets/x", "/api/v1/Apply", "/api/v1/delete", "/.git/config", "/static/",
    )  # fmt: skip
    admin = coordinator.admin()
    for path in paths:
        reply = ask(path, caller=admin)
        assert (reply.status, reply.code) == (404, Code.NOT_FOUND), path
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask("/api/v1/get?kind=nodes", caller=admin, method=method).status == 404, method
    record("A49", "P", len(paths), listener="dashboard")


def test_a49_what_was_written_comes_back_as_json_that_no_page_runs(coordinator: CoordinatorServer, ask: Any) -> None:
    script = "<script>alert(1)</script>"
    reply = ask("/api/v1/plan", caller=coordinator.admin(), method="POST", body=f"kind: {script}".encode(),
                content_type="application/yaml")  # fmt: skip
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert script in json.dumps(json.loads(reply.body)["problems"])
    for path in (f"/api/v1/get?kind={script}", f"/{script}"):
        assert ask(path.replace("<", "%3C"), caller=coordinator.admin()).headers["content-type"] == "application/json"


def test_what_is_too_large_or_no_json_is_refused(coordinator: CoordinatorServer, ask: Any) -> None:
    admin = coordinator.admin()
    sent = {"caller": admin, "method": "POST", "content_type": "application/yaml"}
    assert ask("/api/v1/plan", body=b"#" * (256 * 2**10 + 1), **sent).code == Code.TOO_LARGE
    for body in (b"", b"[]", b"{", b'{"link":1}', b"[" * 1000, b"\xff"):
        reply = ask("/api/v1/login", method="POST", body=body, content_type="application/json")
        assert (reply.status, reply.code) == (400, Code.INVALID_ARGUMENT), body
    assert ask("/api/v1/login", method="POST", body=b"x" * 2000, content_type="application/json").code == Code.TOO_LARGE


def test_tables_that_there_are_not_are_refused(coordinator: CoordinatorServer, ask: Any) -> None:
    """A page would show them as empty."""
    for tables in ("nodes,nonsense", "<script>", "nodes,,figures,Nodes"):
        refused = ask(f"/api/v1/live?tables={tables}", caller=coordinator.admin())
        assert (refused.status, refused.code) == (400, Code.INVALID_ARGUMENT), tables
    assert ask("/api/v1/live?tables=nodes,figures", caller=coordinator.admin()).status == 200


def test_a48_an_open_page_ends_with_the_certificate_behind_it(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    stub = operator(coordinator.link, coordinator.admin())
    token = stub.CreateToken(operator_pb2.CreateTokenRequest(role="viewer", name="guest", valid_s=60), timeout=10)
    assert token.token
    viewer = coordinator.certificate(Role.VIEWER, "guest")
    connection = connect(coordinator, viewer, tmp_path)
    connection.request("GET", "/api/v1/live?tables=region,events")
    reply = connection.getresponse()
    assert reply.status == 200
    seen = bytearray()

    def is_whole() -> bool:
        seen.extend(reply.read1(65536))
        return b'"code":"TOKEN_CREATED"' in seen and b"event: now" in seen

    wait_until(is_whole, 10, "the table of events")
    expired = coordinator.certificate(Role.VIEWER, "late", valid_s=3.0)
    late = connect(coordinator, expired, tmp_path)
    late.request("GET", "/api/v1/live?tables=region")
    told = late.getresponse()
    ended = bytearray()

    def is_over() -> bool:
        data = told.read1(65536)
        ended.extend(data)
        return not data

    wait_until(is_over, 10, "the stream of an expired certificate ends")
    assert told.status == 401 or b"CERT_EXPIRED" in ended
    connection.close()
