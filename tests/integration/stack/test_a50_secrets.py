"""A50: secrets and injected text in logs. Canaries planted where secrets live are found nowhere else; text of strangers
stays text; errors name nothing.

The region is that of all tests of this folder: what they logged and left is searched too.
"""

import asyncio
import json
import os
import re
import ssl
import stat
import struct
import subprocess
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from harness.clients.oip import GrpcClient, InferenceError, RestClient, Tensor
from harness.cluster.stack import DevStack, documents, files_of, on_nodes, policy, workload
from harness.crypto.pki import CertificateFiles
from harness.report import record
from shoal.agent.worker import confinement
from shoal.client import InferenceClient
from shoal.devstack.process_supervisor import program_path
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.trace import TraceParent
from shoal.v1 import artifacts_pb2, link_pb2, operator_pb2
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK_BYTES, channel_options

NAME = "canary"
OTHER = "canary-other-tenant"
TENSOR = b"CaNaRyTeNsOr4242"
"""Also four numbers."""
X = Tensor("x", "FP32", (1, 4), TENSOR)
HOSTILE = "a\nb\r\x1b[31mred\x1b]0;title\x07"
TRACED = TraceParent("ca" * 16, "fe" * 8, sampled=True)
WRONG_BEARER = "canary-bearer-that-nobody-made"
PASSPHRASE = "canary-passphrase"


@pytest.fixture(scope="module")
def tenant(stack: DevStack) -> Iterator[tuple[CertificateFiles, str]]:
    """Of another name than the workload's owner; a certificate and a bearer token."""
    stack.apply(documents(policy(NAME, on_nodes(["plain-cpu"])), workload(NAME, "relu", NAME)))
    stack.wait_serving(NAME)
    yield stack.tenant(OTHER)
    stack.delete_workloads(NAME)


def gateway(stack: DevStack, files: CertificateFiles | None = None, bearer: str = "") -> GrpcClient:
    port = stack.port("gateway", "data")
    return GrpcClient(port, stack.client_files.authority.read_bytes(), files, bearer)


async def collect_client_errors(stack: DevStack, tenant: tuple[CertificateFiles, str]) -> list[tuple[str, str]]:
    """Everything that the gateway's listeners tell whoever is refused, tensors and tokens in hand: (tenant, text)."""
    files, bearer = tenant
    told: list[tuple[str, str]] = []
    owner, other = gateway(stack, stack.client_files), gateway(stack, files)
    tokens = [gateway(stack, bearer=bearer), gateway(stack, bearer=WRONG_BEARER)]
    short, unnamed = Tensor("x", "FP32", (1, 3), TENSOR), Tensor("CaNaRy", "FP32", (1, 4), TENSOR)
    assert (await owner.infer(NAME, (X,))).outputs[0].raw
    for client, model, tensors, more in (
        (owner, "nothing", (X,), {}), (owner, NAME, (short,), {}), (owner, NAME, (unnamed,), {}), (owner, NAME, (), {}),
        (owner, NAME, (X,), {"shoal-tenant": "nobody"}), (other, NAME, (X,), {}),
        (other, NAME, (X,), {"shoal-hop": "1"}), (tokens[0], NAME, (X,), {}), (tokens[1], NAME, (X,), {}),
        (owner, HOSTILE, (X,), {}),
    ):  # fmt: skip
        with pytest.raises(InferenceError) as failed:
            await client.infer(model, tensors, extra_metadata=more)
        told.append((OTHER if client in (other, tokens[0]) else "default", str(failed.value)))
    for client in (owner, other, *tokens):
        await client.close()
    port, authority = stack.port("gateway", "data"), stack.client_files.authority.read_bytes()
    ways = [
        RestClient(port, authority, files),
        RestClient(port, authority),
        RestClient(port, authority, None, WRONG_BEARER),
    ]
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [42.4242] * 4}]}).encode()
    paths = (
        f"/v2/models/{NAME}/infer",
        "/v2/models/..%2f..%2fetc/infer",
        "/v2/models/a%0d%0aX-Evil:%201/infer",
        "/x" * 99,
    )
    for rest in (*ways, RestClient(port, authority, stack.client_files)):
        for path in paths:
            answer = await rest.exchange(rest.request_bytes("POST", path, body))
            assert answer.status >= 400
            assert "x-evil" not in answer.headers
            told.append((OTHER if rest is ways[0] else "default", f"{answer.headers} {answer.body.decode()}"))
    return told


def collect_coordinator_errors(stack: DevStack, identities: Iterable[CertificateFiles]) -> list[str]:
    """To every method of every service, from every role, with nothing and with junk in the message."""
    told = []
    services = [
        (module.DESCRIPTOR.services_by_name[name], module.DESCRIPTOR.package)
        for module, name in ((operator_pb2, "Operator"), (artifacts_pb2, "Artifacts"), (link_pb2, "AgentLink"))
    ]
    name = dns_of(stack.info.stack.region, Role.COORDINATOR, "coordinator")
    for files in identities:
        certificate, key, authority = files.read()
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        address = stack.info.stack.coordinator.addresses["link"]
        with grpc.secure_channel(address, credentials, channel_options(LINK_BYTES, server_name=name)) as channel:
            for service, package in services:
                for method in service.methods:
                    if method.name in ("RotateAuthority", "CreateToken", "Events", "Doctor", "Session"):
                        continue  # these do something or go on
                    call = channel.stream_stream(f"/{package}.{service.name}/{method.name}", None, None)
                    for message in (b"", b"\x0a\x06" + b"CaNaRy", b"\xff" * 9):
                        try:
                            list(call(iter((message,)), timeout=20))
                        except grpc.RpcError as error:
                            trailing: Any = error
                            told.append(f"{trailing.code().name} {trailing.details()} {trailing.trailing_metadata()}")
    return told


def secrets_of(stack: DevStack, tenant: tuple[CertificateFiles, str]) -> dict[str, bytes]:
    """By where each lives: the middle of every private key, tokens, tensors, nonces."""
    found = {"bearer": tenant[1].encode(), "tensor": TENSOR, "wrong bearer": WRONG_BEARER.encode()}
    found["passphrase"] = PASSPHRASE.encode()
    for path in files_below(stack.folder):
        content = path.read_bytes()
        for number, key in enumerate(re.findall(rb"PRIVATE KEY-----\s+([^-]+)", content)):
            found[f"{path.name} {number} of {path.parent.name}"] = key.split()[0][10:50]
        if path.match("run/worker-*.json"):
            found[f"nonce of {path.stem}"] = json.loads(content)["nonce"].encode()
    return found


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def public_surfaces(stack: DevStack, tenant: tuple[CertificateFiles, str]) -> dict[str, bytes]:
    """Logs, metrics, process lists and environments, events, listings, a trace; errors are added by who calls."""
    found = {f"log {path.name}": path.read_bytes() for path in (stack.control.folder / "logs").iterdir()}
    found |= {f"log {path.name}": path.read_bytes() for path in stack.control.folder.glob("*/run/*.log")}
    found |= {f"crash {path.name}": path.read_bytes() for path in stack.control.folder.glob("*/run/*.crash")}
    for pid, _ in stack.processes():
        found[f"command line of {pid}"] = b" ".join(part.encode() for part in psutil.Process(pid).cmdline())
        found[f"environment of {pid}"] = Path(f"/proc/{pid}/environ").read_bytes()
    found["events"] = str(stack.events()).encode()
    with stack.api() as operator:
        for kind in ("nodes", "devices", "workloads", "placements", "tokens"):
            found[f"listing of {kind}"] = str(operator.get(kind)).encode()
        with InferenceClient(stack.info.operator, f"127.0.0.1:{stack.port('gateway', 'data')}") as client:
            client.infer(NAME, {"x": np.frombuffer(TENSOR, np.float32)[None]}, traceparent=str(TRACED))
        found["trace"] = str(operator.trace(TRACED.trace)).encode()
    assert b"shoal.workload" in found["trace"]
    scraped = 0
    context = ssl.create_default_context(cafile=str(stack.client_files.authority))
    operator_files = files_of(stack.info.operator)
    context.load_cert_chain(operator_files.certificate, operator_files.key)
    for member in stack.info.stack.members:
        for use in ("metrics", "front-metrics"):
            if use in member.addresses:
                url = f"https://{member.addresses[use]}/metrics"
                with urllib.request.urlopen(url, context=context, timeout=10) as answer:
                    found[f"{use} of {member.name}"] = answer.read()
                    scraped += 1
    assert scraped >= 5
    return found


def hits(secrets: dict[str, bytes], surfaces: dict[str, bytes]) -> list[str]:
    return [
        f"{name} in {where}"
        for where, content in surfaces.items()
        for name, secret in secrets.items()
        if secret in content
    ]


def test_a50_secrets_stay_where_they_live(stack: DevStack, tenant: tuple[CertificateFiles, str]) -> None:
    told = [text for _, text in asyncio.run(collect_client_errors(stack, tenant))]
    told += collect_coordinator_errors(stack, (files_of(stack.info.operator), stack.client_files, tenant[0]))
    signing = stack.folder / "signing.pem"
    key = subprocess.run(
        [*program_path("shoal"), "model", "key", str(signing), "--new"],
        env={**os.environ, "SHOAL_KEY_PASSPHRASE": PASSPHRASE}, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    secrets, surfaces = secrets_of(stack, tenant), public_surfaces(stack, tenant)
    surfaces |= {"errors": "\n".join(told).encode(), "what `model key` prints": key.stdout + key.stderr}
    # four numbers as a log or an error would show them
    secrets["tensor as numbers"] = f"{struct.unpack('<4f', TENSOR)[0]:.4g}".encode()
    assert hits(secrets, surfaces) == []
    assert hits({"planted": b"relu"}, surfaces), "the search finds what is there"
    assert len([name for name in secrets if "pem" in name]) >= 6, "of CA, coordinator, nodes, operator, tenants"
    record("A50", "P", 1, canaries=len(secrets), surfaces=len(surfaces), hits=0)


def test_a50_what_holds_a_secret_is_its_owners_alone(stack: DevStack, tenant: tuple[CertificateFiles, str]) -> None:
    """Files, and the folders of sockets; and no process leaves a core."""
    secrets = {name: each for name, each in secrets_of(stack, tenant).items() if "tensor" not in name}
    checked = 0
    for path in files_below(stack.folder):
        if any(secret in path.read_bytes() for secret in secrets.values()):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
            checked += 1
    for folder in stack.control.folder.glob("*/run"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    for (pid, _), role in stack.processes().items():
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(r"Max core file size\s+0\s+0\s", limits) or role.endswith("/broker"), (
            f"{role} would leave a core"
        )
    assert checked >= 6
    record("A50", "P", 1, private_files=checked)


def test_a50_whoever_speaks_writes_no_line_of_its_own(stack: DevStack, tenant: tuple[CertificateFiles, str]) -> None:
    """Line breaks and terminal sequences in names, headers, documents and messages of agents."""
    asyncio.run(collect_client_errors(stack, tenant))
    with stack.api() as operator:
        operator.plan([operator_pb2.Document(name=HOSTILE, text=f"kind: {HOSTILE}")])
        for call in (lambda: operator.get(HOSTILE), lambda: operator.revoke(HOSTILE, reason=HOSTILE)):
            with pytest.raises(ShoalError):
                call()
    lines = 0
    for path in (stack.control.folder / "logs").iterdir():
        for line in path.read_bytes().splitlines():
            assert all(0x20 <= byte < 0x7F for byte in line), line
            assert json.loads(line)["event"]
            lines += 1
    assert lines
    record("A50", "P", 1, log_lines=lines)


def test_errors_name_nothing_that_the_caller_did_not_send(
    stack: DevStack, tenant: tuple[CertificateFiles, str]
) -> None:
    """Neither paths nor addresses, keys nor other tenants; codes with a remedy are told, and how often."""
    told = asyncio.run(collect_client_errors(stack, tenant))
    by_coordinator = collect_coordinator_errors(stack, (files_of(stack.info.operator), stack.client_files, tenant[0]))
    texts = [*by_coordinator, *(text for _, text in told)]
    places = [f"127.0.0.1:{stack.port(name, use)}" for name, use in (("plain-cpu", "data"), ("coordinator", "enrol"))]
    for text in texts:
        for secret in (str(stack.folder), "/tmp", "/usr", "site-packages", "Traceback", ".py", "worker-", *places):
            assert secret not in text, text
    for caller, text in told:
        assert not any(node in text for node in ("plain-cpu", "edge-npu")), f"a tenant is told of nodes: {text}"
        stranger = "default/" if caller == OTHER else OTHER
        assert stranger not in text, f"another tenant is named: {text}"
    codes = {code for code in Code if any(code in text.split() or f"'{code}'" in text for text in texts)}
    assert len(codes) >= 8, codes
    assert Code.INTERNAL not in codes, "nothing was unforeseen"
    record("A50", "P", 1, error_texts=len(texts), codes=len(codes))


def test_a35_the_doctor_tells_what_workers_cannot_do(stack: DevStack) -> None:
    """Of this very machine, which the tests of captured workers ran on; the agents told their coordinator."""
    told = stack.shoal("doctor", "agent").stdout
    but = f", but for {'; '.join(lacking)}" if (lacking := confinement.unsupported_restrictions()) else ""
    for node in ("plain-cpu", "edge-npu"):
        assert f"node {node} confines its workers{but}" in told, told
    record("A35", "P", 1, lacking=len(lacking))
