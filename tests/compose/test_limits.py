"""Containers that run out of something: disk, descriptors, threads, memory; under load at the published ports."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from harness.cluster.compose import STEADY, WAIT_TIMEOUT_S, Compose, docker
from harness.cluster.stack import documents, on_nodes, policy, workload
from harness.faults.disk import fill_disk, small_disk
from harness.models import engine_cases
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import Code, ShoalError
from shoal.v1 import operator_pb2

pytestmark = [pytest.mark.compose, pytest.mark.alone, pytest.mark.timeout(300)]

SMALL = "edge-small"
EMULATED = ("--no-cpu", "--emulate=rk3588s", "--label=price=9 USD/h")
DISK_BYTES = 192 * 2**20
RECOVERS_S = 10.0
SPARE = 8
"""Descriptors left to a process beyond those that it has open."""
STRANGERS = 64
LARGE_BYTES = 3 * 2**20
"""Of a document that is refused: more than a policy may have, less than a message may."""


def test_f32_a_disk_that_is_full_refuses_what_is_new_and_keeps_what_runs(hurt: Compose, tmp_path: Path) -> None:
    """An agent more, on a small file system."""
    for name, model in (("one", engine_cases.add_one()), ("two", engine_cases.heavy(8))):
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(model)
        with hurt.api() as api:
            api.push(path, name)
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk, hurt.extra_agent(SMALL, "edge-arm", disk, *EMULATED):
        wait_until(
            lambda: hurt.is_measured("edge", (SMALL,)), WAIT_TIMEOUT_S, "it has joined and was measured", every_s=0.2
        )
        there = policy("small", on_nodes([SMALL]))
        hurt.apply(documents(there, workload("kept", "relu", "small")))
        hurt.placements("kept", replicas=1)
        with hurt.load("kept") as load:
            fill_disk(disk / "ballast")
            hurt.apply(documents(there, workload("bulky", "two", "small")))

            def observed_codes() -> set[str]:
                return {row.observed.code for row in hurt.placement_rows("bulky")}

            wait_until(
                lambda: Code.DISK_FULL in observed_codes(), WAIT_TIMEOUT_S, "the full disk in the status", every_s=0.2
            )
            fill_disk(disk / "ballast")
            load.wait_for(40)
            freed = load.now()
            (disk / "ballast").unlink()
            hurt.placements("bulky", replicas=1)
            placed_s = load.now() - freed
            load.wait_for(20)
        hurt.delete_workloads("kept", "bulky")
    with hurt.api() as api:
        api.revoke(SMALL, reason="the test is over")
        api.delete("node", SMALL)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    record("F32", "C", 1, sent=verdict.sent, lost=0, placed_once_there_was_room_s=round(placed_s, 2))


def test_f48_descriptors_are_used_up(hurt: Compose) -> None:
    """A process may open few more than it has; strangers take those. Who is connected is served; nobody dies."""
    service, part, port = "cloud-coordinator", "shoal-coordinator", hurt.port("link", "cloud")
    started, process = hurt.container(service)["State"]["StartedAt"], the(hurt, service, part)
    with hurt.api("cloud") as connected, hurt.load(STEADY, other_ports=()) as load:
        connected.who_am_i()
        with few_descriptors(hurt, service, part, process), strangers(hurt, port) as shut_out:
            load.wait_for(20)
            connected.get("nodes")
            assert shut_out, "there were enough"
            refused = len(shut_out)
        freed = load.now()
        wait_until(lambda: enters(hurt, port), RECOVERS_S, "somebody new is let in", every_s=0.2)
        recovered_s = load.now() - freed
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert process.is_running()
    assert hurt.container(service)["State"]["StartedAt"] == started
    record(
        "F48", "C", 1, used_up="descriptors", of=service, strangers=STRANGERS, refused=refused, sent=verdict.sent,
        lost=0, crashes=0, recovered_s=round(recovered_s, 2),
    )  # fmt: skip


@pytest.mark.parametrize(("service", "part"), [("edge-gateway", " front"), ("cloud-coordinator", "shoal-coordinator")])
def test_f48_threads_are_used_up(hurt: Compose, service: str, part: str) -> None:
    """The container may start no thread and no process more."""
    started, process = hurt.container(service)["State"]["StartedAt"], the(hurt, service, part)
    limit = hurt.container(service)["HostConfig"]["PidsLimit"]
    name = hurt.container(service)["Id"]
    with hurt.api("cloud") as connected, hurt.load(STEADY, other_ports=()) as load:
        threads = sum(psutil.Process(pid).num_threads() for pid in hurt.processes(service))
        docker("update", f"--pids-limit={threads}", name)
        try:
            with ThreadPoolExecutor(16) as together:
                answers = list(together.map(lambda _: ask_code(hurt), range(64)))
            connected.get("nodes")
            load.wait_for(40)
        finally:
            docker("update", f"--pids-limit={limit}", name)
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert process.is_running()
    assert hurt.container(service)["State"]["StartedAt"] == started
    record(
        "F48", "C", 1, used_up="threads", of=service, threads=threads, answered=answers.count(""),
        refused=len(answers) - answers.count(""), sent=verdict.sent, lost=0, crashes=0,
    )  # fmt: skip


def test_f48_a_coordinator_s_memory_is_not_used_up_by_who_sends_much(hurt: Compose) -> None:
    """As much as it takes, at once, from many: each is refused, and it stays within its container's limit."""
    service = "cloud-coordinator"
    started, before = hurt.container(service)["State"]["StartedAt"], hurt.memory_bytes(service)[service]
    document = operator_pb2.Document(name="large.yaml", text="#" * LARGE_BYTES)

    def send(_: int) -> str:
        with hurt.api("cloud") as api, contextlib.suppress(ShoalError):
            return ",".join(problem.refusal.code for problem in api.apply([document]).problems)
        return "refused"

    with hurt.load(STEADY) as load:
        with ThreadPoolExecutor(32) as together:
            told = list(together.map(send, range(128)))
        after = hurt.memory_bytes(service)[service]
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert "" not in told, "each is told why"
    assert hurt.container(service)["State"]["StartedAt"] == started
    assert not hurt.container(service)["State"]["OOMKilled"]
    figures = {"sent": 128 * LARGE_BYTES, "before": before, "after": after}
    record(
        "F48", "C", 1, used_up="memory", of=service, crashes=0,
        **{f"{name}_mb": round(figure / 1e6) for name, figure in figures.items()},
    )  # fmt: skip


def the(compose: Compose, service: str, part: str) -> psutil.Process:
    """The process of a container whose command line has that part, without its init."""
    found = [pid for pid, line in compose.processes(service).items() if part in line and "docker-init" not in line]
    assert len(found) == 1, compose.processes(service)
    return psutil.Process(found[0])


PRLIMIT = """
import os, pathlib, resource, sys
for each in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    pid, line = int(each.parent.name), each.read_bytes().replace(bytes(1), b" ").decode()
    if sys.argv[1] in line and "docker-init" not in line and pid != os.getpid():
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (int(sys.argv[2]) or hard, hard))
        print("limited")
"""
"""By the container's own user, who may; root of this machine may lack the right."""


@contextlib.contextmanager
def few_descriptors(compose: Compose, service: str, part: str, process: psutil.Process) -> Iterator[None]:
    most = max(int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir()) + 1 + SPARE
    assert compose.run_in(service, "python3", "-c", PRLIMIT, part, str(most)) == "limited\n"
    try:
        yield
    finally:
        compose.run_in(service, "python3", "-c", PRLIMIT, part, "0")


def tls_connect(compose: Compose, port: int) -> ssl.SSLSocket:
    """Raises OSError: nobody shook hands within a second."""
    files = compose.client_files("cloud" if port == compose.port("link", "cloud") else "edge")
    trust = ssl.create_default_context(cafile=files.authority)
    trust.load_cert_chain(files.certificate, files.key)
    trust.set_alpn_protocols(["h2"])
    plain = socket.create_connection(("127.0.0.1", port), timeout=1.0)
    try:
        return trust.wrap_socket(plain, server_hostname="localhost")
    except OSError:
        plain.close()
        raise


def enters(compose: Compose, port: int) -> bool:
    tls_connect(compose, port).close()
    return True


@contextlib.contextmanager
def strangers(compose: Compose, port: int) -> Iterator[list[str]]:
    """Many, all at once, who stay; why those that could not come in were shut out."""
    with contextlib.ExitStack() as inside:
        shut_out: list[str] = []

        def connect(_: int) -> None:
            try:
                inside.enter_context(tls_connect(compose, port))
            except OSError as refused:
                shut_out.append(str(refused))

        with ThreadPoolExecutor(STRANGERS) as together:
            list(together.map(connect, range(STRANGERS)))
        yield shut_out


def ask_code(compose: Compose) -> str:
    """By somebody new; empty: answered right; else the code."""
    try:
        return "" if compose.ask(STEADY) else "wrong"
    except ShoalError as refused:
        return str(refused.code)
