"""A region under load whose CA is followed by another, and one of whose nodes is revoked: rows F30 and A09."""

import asyncio
import json
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from harness.clients.oip import GrpcClient, InferenceError
from harness.cluster.stack import DevStack, InferenceLoad
from harness.crypto.pki import CertificateFiles
from harness.report import record
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.types.codes import Code

NODES = ("plain-cpu", "edge-npu")
MEMBERS = (*NODES, "gateway")
FORWARDED = {"shoal-hop": "1", "shoal-tenant": "default", "shoal-origin": "edge-npu"}
WAIT_TIMEOUT_S = 60.0


def copy_files(files: CertificateFiles, folder: Path) -> CertificateFiles:
    """As they are now."""
    folder.mkdir()
    for name, content in zip(("cert.pem", "key.pem", "ca.pem"), files.read(), strict=True):
        (folder / name).write_bytes(content)
    return files_in(folder)


def files_in(folder: Path) -> CertificateFiles:
    return CertificateFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")


def code_of(port: int, files: CertificateFiles, said: dict[str, str] | None = None) -> str:
    """What a front says to who shows these files on a connection of its own; empty when it is let in."""

    async def ask() -> str:
        client = GrpcClient(port, files.authority.read_bytes(), files)
        client.default_metadata = said or {}
        try:
            await client.ready()
        except InferenceError as error:
            return error.code or str(error.status)
        finally:
            await client.close()
        return ""

    return asyncio.run(ask())


def is_refused(port: int, files: CertificateFiles) -> bool:
    return code_of(port, files, FORWARDED) == Code.CERT_REVOKED


def loaded_assignments(stack: DevStack, node: str) -> list[str]:
    """Assignments that have a process there; a spare worker has none."""
    told = [json.loads(path.read_text()) for path in stack.control.folder.glob(f"{node}/run/worker-*.json")]
    return [one["id"] for each in told for one in each["assignments"]]


def stage(stack: DevStack) -> str:
    with stack.api() as api:
        return str(api.authority().stage)


@pytest.mark.parametrize("turns", [1, pytest.param(3, marks=pytest.mark.long)])
def test_f30_the_ca_is_followed_by_another_under_load(pair: DevStack, tmp_path: Path, turns: int) -> None:
    """As an operator does it. The tenant's client brings its own files up to date; who has yet to do so is served all
    the while, also on new connections. Each node calls anew once for its new certificate, not all at the same time."""
    processes, workers = pair.processes(), pair.workers()
    before = pair.events()[-1].sequence
    gateway = pair.port("gateway", "data")
    clock = CoordinatorClock()
    for turn in range(turns):
        with pair.api() as api:
            old = [root.fingerprint for root in api.authority().roots if root.state == "issuing"]
        linked = {name: len(pair.log_lines(name, "session_opened")) for name in MEMBERS}
        outdated = copy_files(pair.client_files, tmp_path / f"outdated-{turn}")
        began = clock.now()
        with InferenceLoad(gateway, outdated, "pair") as load:
            begun = pair.shoal("ca", "rotate", "--wait", "0s")
            assert begun.returncode == 0, begun.stderr
            wait_until(lambda: stage(pair) == "issue", WAIT_TIMEOUT_S, "the next CA to issue")

            def lagging() -> list[str]:
                with pair.api() as api:
                    return [each.uri for each in api.authority().laggards]

            wait_until(
                lambda: all("/tenant/" in uri for uri in lagging()), WAIT_TIMEOUT_S, "every node to have followed"
            )
            assert [uri.partition("/tenant/")[2] for uri in lagging()] == ["default"], (
                "whoever holds files of its own is waited for"
            )
            for name in MEMBERS:
                assert code_of(pair.port(name, "data"), outdated) == "", f"{name} to who trusts the old CA alone"
            client = str(Path(pair.client_files.certificate).parent)
            renewed = pair.shoal("context", "renew", "--files", client)
            assert renewed.returncode == 0, renewed.stderr
            wait_until(lambda: stage(pair) == "idle", WAIT_TIMEOUT_S, "the old CA to go")
            took_s = clock.now() - began
            with InferenceLoad(gateway, pair.client_files, "pair") as fresh:
                load.wait_for(50)
        for each in (load, fresh):
            verdict = each.verdict()
            assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
        with pair.api() as api:
            states = {root.fingerprint: root.state for root in api.authority().roots}
        assert states[old[0]] == "retired"
        assert list(states.values()).count("issuing") == 1
        calls = {name: len(pair.log_lines(name, "session_opened")) - count for name, count in linked.items()}
        assert calls == dict.fromkeys(MEMBERS, 1), "one new session each, for its new certificate"
        wait_until(
            lambda: all(code_of(pair.port(name, "data"), pair.client_files) == "" for name in MEMBERS),
            WAIT_TIMEOUT_S,
            "every front to show a certificate of the new CA",
        )
        record("F30", "P", turns, lost=0, sent=load.verdict().sent, sessions=calls, took_s=round(took_s, 1))
    assert pair.processes() == processes, "nothing was restarted"
    assert pair.workers() == workers
    assert not [event for event in pair.events(before) if event.code in ("NODE_LOST", "NODE_SUSPECT")]
    assert pair.doctor() == []


def test_keys_lie_in_files_that_only_their_owner_reads_and_nowhere_else(pair: DevStack) -> None:
    """Of the CA, the region, its operator, its nodes and its clients; none in the store, a log or a command line."""
    folder = pair.control.folder
    holding = [path for path in folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    assert {path.name for path in holding} == {"key.pem"}
    kept_in = {part for path in holding for part in path.relative_to(folder).parts[:-1]}
    assert kept_in >= {"ca", "server", "operator", "identity", "client"}
    assert [oct(path.stat().st_mode & 0o777) for path in holding] == ["0o600"] * len(holding)
    assert not [path for path in holding if path.parent.stat().st_mode & 0o077]
    for pid, _ in pair.processes():
        assert b"PRIVATE KEY" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a09_a_revoked_node_is_out_at_once_and_nothing_is_lost(pair: DevStack, tmp_path: Path) -> None:
    """Its session, its routes, its word among the fronts, its renewal; and it stops serving itself."""
    stolen = copy_files(files_in(pair.control.folder / "edge-npu" / "identity"), tmp_path / "stolen")
    forwarded = code_of(pair.port("plain-cpu", "data"), stolen, FORWARDED)
    assert forwarded == Code.FORWARD_DENIED, "let in, until it is revoked: its forward proves nothing"
    before = pair.events()[-1].sequence
    down = len(pair.log_lines("edge-npu", "session_closed"))
    with InferenceLoad(pair.port("gateway", "data"), pair.client_files, "pair") as load:
        done = pair.shoal("node", "revoke", "edge-npu", "--reason", "it was stolen")
        assert done.returncode == 0, done.stderr
        event = next(each for each in pair.events(before) if each.code == "NODE_REVOKED")
        wait_until(
            lambda: len(pair.log_lines("edge-npu", "session_closed")) > down, WAIT_TIMEOUT_S, "its session to end"
        )
        ended = pair.log_lines("edge-npu", "session_closed")[down]
        assert ended["code"] == Code.CERT_REVOKED
        closed_s = _stamp(ended["timestamp"]) - event.at
        assert closed_s <= 1.0
        for name in ("plain-cpu", "gateway"):
            refusing = partial(is_refused, pair.port(name, "data"), stolen)
            wait_until(refusing, WAIT_TIMEOUT_S, f"{name} to refuse it")
        routed = [row.node for row in pair.placements("pair") if row.routed]
        assert routed == ["plain-cpu"]
        load.wait_for(100)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    wait_until(lambda: not loaded_assignments(pair, "edge-npu"), WAIT_TIMEOUT_S, "it to stop serving")
    assert loaded_assignments(pair, "plain-cpu")
    failing = pair.doctor()
    assert any("edge-npu" in line and "revoked" in line for line in failing), failing
    record("A09", "P", 1, closed_after_s=round(closed_s, 3), lost=verdict.lost_count, sent=verdict.sent)


def _stamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
