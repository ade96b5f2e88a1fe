"""A completion asks a region that answers late, or not at all, no longer than somebody waits for it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest
from click.shell_completion import ShellComplete

from harness.crypto.pki import Authority
from harness.ports import free_ports
from shoal.cli.main import shoal
from shoal.cli.names import COMPLETION_S
from shoal.client import Context, Contexts, connection
from shoal.coordinator.clock import CoordinatorClock
from shoal.types.device import Role
from shoal.v1 import nouns_pb2, operator_pb2

NODE = operator_pb2.GetReply(nodes=[operator_pb2.NodeView(node=nouns_pb2.Node(name="edge-npu"))])


class LateRegion(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # at run time it takes none
    """Answers the first `answers` calls with one node, each `after_s` late; no other before it ends."""

    def __init__(self) -> None:
        self.answers, self.after_s = 0, 0.0
        self.asked = list[tuple[str, float]]()
        """Method of each call, and the seconds that it had left."""
        self.over = Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method.rpartition("/")[2]

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.asked.append((method, context.time_remaining()))
            self.over.wait(self.after_s if len(self.asked) <= self.answers else None)
            return NODE.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateRegion]:
    """That of the context in use."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    authority, late = Authority(tmp_path / "pki", "eu", CoordinatorClock().wall()), LateRegion()
    certificate, key, ca = authority.issue(Role.COORDINATOR, "coordinator").read()
    (tmp_path / "ann").mkdir()
    for name, content in zip(
        ("cert.pem", "key.pem", "ca.pem"), authority.issue(Role.OPERATOR, "ann").read(), strict=True
    ):
        (tmp_path / "ann" / name).write_bytes(content)
    server = grpc.server(ThreadPoolExecutor(8), handlers=[late])
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
    )
    server.start()
    Contexts().save(Context("eu", "eu", f"127.0.0.1:{port}", str(tmp_path / "ann")))
    yield late
    late.over.set()
    server.stop(None).wait()


def complete(*words: str) -> list[str]:
    return [each.value for each in ShellComplete(shoal, {}, "shoal", "_").get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("words", "method"),
    [
        (("drain", ""), "Get"),
        (("model", "rm", ""), "List"),
        (("migrate", "reader", "--to", ""), "Get"),
        (("get", "all", ""), "Get"),
    ],
)
def test_a_region_that_does_not_answer_is_asked_once(region: LateRegion, words: tuple[str, ...], method: str) -> None:
    assert complete(*words) == []
    assert [each for each, _ in region.asked] == [method]
    assert region.asked[0][1] <= COMPLETION_S


def test_all_calls_of_a_completion_have_one_deadline_and_what_came_is_shown(region: LateRegion) -> None:
    region.answers, region.after_s = 2, 0.5
    assert complete("migrate", "reader", "--to", "") == ["edge-npu"]
    assert [each for each, _ in region.asked] == ["Get", "Get", "GetFederation"]
    left = [left for _, left in region.asked]
    assert left[0] <= COMPLETION_S
    # gRPC rounds what it sends of a deadline.
    assert left[1] < left[0] - region.after_s / 2
    assert left[2] < left[1] - region.after_s / 2


@pytest.mark.timeout(60)
def test_a_completion_outwaits_no_election(region: LateRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ELECTION_TIMEOUT_S", 600.0)
    found = Contexts().get("")
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    Contexts().save(Context(found.name, found.region, addresses, str(found.ca.parent)))
    assert complete("drain", "") == []
