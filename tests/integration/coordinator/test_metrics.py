"""The metrics page of a coordinator of either role, from its first scrape on."""

import ssl
import urllib.request
from pathlib import Path

import grpc
import pytest

from harness.cluster.coordinator import REGION, CoordinatorServer, channel, operator_of
from harness.metrics import PAGES, check_page
from shoal.types.codes import ShoalError
from shoal.wire.enrol import redeem
from shoal.wire.member_files import Enrolled

STRANGE = "hunter2"
"""What a caller chooses."""


def scrape(server: CoordinatorServer, operator: Enrolled) -> str:
    folder = Path(server.ready["operator_dir"])
    context = ssl.create_default_context(cadata=operator.ca_pem.decode())
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with urllib.request.urlopen(f"https://{server.metrics}/metrics", context=context, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("role", ["region", "federation"])
def test_a_fresh_page_has_every_metric_and_no_word_of_a_caller(tmp_path: Path, role: str) -> None:
    server = CoordinatorServer(tmp_path, role=role)
    server.start()
    try:
        operator = operator_of(REGION, Path(server.ready["operator_dir"]))
        check_page(scrape(server, operator), PAGES[role])
        token = f"shoal-join.{REGION}.{server.ready['ca_sha256']}.{STRANGE}"
        with pytest.raises(ShoalError):
            redeem(server.enrol, token, STRANGE)
        if role == "region":
            with channel(server.link, operator) as opened, pytest.raises(grpc.RpcError):
                opened.unary_unary(f"/shoal.v1.Operator/{STRANGE}", bytes, bytes)(b"", timeout=10)
        text = scrape(server, operator)
        check_page(text, PAGES[role])
        assert STRANGE not in text
    finally:
        server.end()
