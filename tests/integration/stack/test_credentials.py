"""Join tokens that are wrong, used or over, and certificates that have run out, before a call and during one (A01)."""

import asyncio
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.cluster.stack import DevStack, documents, expected_answer, files_of, on_nodes, policy, workload
from harness.crypto.pki import CertificateFiles
from harness.measure.contention import startup_slowdown_s
from harness.report import record
from shoal.agent.clock import SystemClock
from shoal.client import Context, InferenceClient, RegionClient
from shoal.coordinator.identity.authority import FileAuthority
from shoal.devstack.process_supervisor import program_path
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.units import Seconds
from shoal.wire.certificates import identity_of_pem

NAME = "guarded"
CLOSED_WITHIN_S = 1.0


@pytest.fixture(scope="module")
def guarded_stack(stack: DevStack) -> Iterator[DevStack]:
    stack.apply(documents(policy(NAME, on_nodes(["plain-cpu"])), workload(NAME, "relu", NAME)))
    stack.wait_serving(NAME)
    yield stack
    stack.delete_workloads(NAME)


def issue(stack: DevStack, role: Role, name: str, lifetime_s: float) -> Context:
    """A context whose certificate the region's own authority issued, for as long as the test wants."""
    wall = SystemClock().wall()
    folder = stack.control.folder / stack.info.stack.coordinator.name
    authority = FileAuthority.open(folder / "ca", stack.info.stack.region, wall=wall, may_create=False)
    place = stack.folder / f"{role}-{name}-{lifetime_s:g}"
    authority.enrol_self(role, name, lifetime_s=Seconds(lifetime_s), wall=wall).write(place)
    context = replace(stack.info.operator, name=f"short-{role}", folder=str(place))
    stack.contexts.save(context, use=False)
    return context


def ends_at(context: Context) -> float:
    return identity_of_pem(context.certificate.read_bytes()).not_after


def join(stack: DevStack, token: str, name: str, state: Path) -> subprocess.CompletedProcess[str]:
    enrol = stack.info.stack.coordinator.addresses["enrol"]
    return subprocess.run(
        [*program_path("shoal-agent"), "join", "--coordinator", enrol, "--name", name, "--state-dir", str(state)],
        env={"SHOAL_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_wrong_used_and_expired_tokens(stack: DevStack, tmp_path: Path) -> None:
    """For a device and for an operator: each its code, and what to do."""
    enrol = stack.info.stack.coordinator.addresses["enrol"]

    def token(role: str, name: str, valid: str = "1h") -> str:
        done = stack.shoal("token", "create", "--role", role, "--name", name, "--valid", valid)
        assert done.returncode == 0, done.stderr
        (text,) = done.stdout.split()  # alone, so that it can go into a file
        return text

    good = token("agent", "edge-9")
    assert join(stack, good, "edge-9", tmp_path / "first").returncode == 0
    wrong = good[:-4] + ("AAAA" if good[-4:] != "AAAA" else "BBBB")
    late = token("agent", "edge-8", "1ms")
    for text, code in ((wrong, Code.TOKEN_INVALID), (good, Code.TOKEN_USED), (late, Code.TOKEN_EXPIRED)):
        refused = join(stack, text, "edge-8", tmp_path / str(code))
        assert refused.returncode == 1
        assert refused.stderr.endswith(f" ({code})\n"), refused.stderr
        assert "shoal token create" in refused.stderr
        assert not (tmp_path / str(code) / "identity" / "cert.pem").exists()

    def login(text: str) -> subprocess.CompletedProcess[str]:
        return stack.shoal("context", "login", "--coordinator", enrol, "--token", text, "--as", "eve", "--name", "eve")

    once = token("viewer", "eve")
    assert login(once).returncode == 0
    viewer = stack.shoal("get", "nodes", "--context", "eve")
    assert viewer.returncode == 0, viewer.stderr
    denied = stack.shoal("cordon", "plain-cpu", "--context", "eve")
    assert (denied.returncode, denied.stderr.split()[-1].strip("()")) == (255, Code.ROLE_DENIED)
    stack.contexts.use("dev")
    for text, code in (
        (token("viewer", "eve", "1ms"), Code.TOKEN_EXPIRED),
        (once, Code.TOKEN_USED),
        ("shoal-join.x", Code.TOKEN_INVALID),
    ):
        refused = login(text)
        assert (refused.returncode, refused.stderr.split()[-1].strip("()")) == (255, code), refused.stderr
    assert stack.contexts.current == "dev"


def test_a01_expired_certificates_are_told_as_such(guarded_stack: DevStack, tmp_path: Path) -> None:
    """An operator's, a tenant's and a node's, none of which TLS lets in: the refused side says why."""
    issue(guarded_stack, Role.OPERATOR, "late", -10.0)
    operator = guarded_stack.shoal("get", "nodes", "--context", "short-operator")
    assert (operator.returncode, operator.stderr.split()[-1].strip("()")) == (255, Code.CERT_EXPIRED), operator.stderr
    assert "enrol again" in operator.stderr

    tenant = issue(guarded_stack, Role.TENANT, "default", -10.0)
    with InferenceClient(tenant) as client, pytest.raises(ShoalError) as refused:
        client.metadata(NAME)
    assert refused.value.code is Code.CERT_EXPIRED

    state = tmp_path / "edge-7"
    with guarded_stack.api() as api:
        assert join(guarded_stack, api.create_token("agent", "edge-7").token, "edge-7", state).returncode == 0
    late = issue(guarded_stack, Role.AGENT, "edge-7", -10.0)
    for file in (late.certificate, late.key):
        (state / "identity" / file.name).write_bytes(file.read_bytes())
    doctor = subprocess.run(
        [*program_path("shoal-agent"), "doctor", "--state-dir", str(state)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert doctor.returncode == 1
    assert Code.CERT_EXPIRED in doctor.stdout, doctor.stdout + doctor.stderr


def test_a01_a_certificate_that_runs_out_ends_open_connections(guarded_stack: DevStack) -> None:
    """An operator's call, its stream of events, and a tenant's inference on a channel that stays open."""
    clock = SystemClock()
    lifetime_s = 4.0 + startup_slowdown_s()
    operator = issue(guarded_stack, Role.OPERATOR, "short", lifetime_s)
    tenant = issue(guarded_stack, Role.TENANT, "default", lifetime_s)
    ended: dict[str, tuple[float, str]] = {}

    def stream() -> None:
        with RegionClient(operator) as api:
            try:
                for _ in api.events(follow=True):
                    pass
            except ShoalError as error:
                ended["stream"] = (clock.wall(), error.code)

    def calls() -> None:
        with RegionClient(operator) as api:
            try:
                while True:
                    api.who_am_i()
            except ShoalError as error:
                ended["calls"] = (clock.wall(), error.code)

    def inference() -> None:
        ended["inference"] = asyncio.run(_until_refused(guarded_stack.port("gateway", "data"), files_of(tenant)))

    threads = [threading.Thread(target=target) for target in (stream, calls, inference)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    over = {"stream": ends_at(operator), "calls": ends_at(operator), "inference": ends_at(tenant)}
    assert {name: code for name, (_, code) in ended.items()} == dict.fromkeys(over, Code.CERT_EXPIRED)
    late = {name: at - over[name] for name, (at, _) in ended.items()}
    assert all(0 <= seconds <= CLOSED_WITHIN_S for seconds in late.values()), late
    record("A01", "P", 1, closed_after_expiry_s={name: round(seconds, 3) for name, seconds in late.items()})


async def _until_refused(port: int, files: CertificateFiles) -> tuple[float, str]:
    """When, and with which code, an open channel's calls are answered no more."""
    clock = SystemClock()
    client = GrpcClient(port, files.authority.read_bytes(), files)
    x = Tensor("x", "FP32", (1, 4), struct.pack("<4f", -1.0, 1.0, 1.5, 0.0))
    try:
        while True:
            answer = await client.infer(NAME, (x,))
            assert answer.outputs[0].raw == expected_answer(1)
    except InferenceError as error:
        return clock.wall(), error.code
    finally:
        await client.close()


def test_files_of_a_client_are_kept_while_they_are_good_and_of_the_tenant_that_was_asked_for(
    guarded_stack: DevStack,
) -> None:
    folder = guarded_stack.folder / "a-client"
    serials, tenants, bearers = [], [], []
    for more in ((), (), ("--tenant", "shop")):
        made = guarded_stack.shoal("context", "client", str(folder), *more)
        assert made.stdout == guarded_stack.info.stack.gateways[0].addresses["data"] + "\n", made.stderr
        identity = identity_of_pem((folder / "cert.pem").read_bytes())
        serials.append(identity.serial)
        tenants.append((identity.role, identity.name))
        bearers.append((folder / "bearer").read_bytes())
    assert tenants == [(Role.TENANT, "default")] * 2 + [(Role.TENANT, "shop")]
    assert serials[0] == serials[1] != serials[2]
    assert bearers[0] == bearers[1] != bearers[2]
