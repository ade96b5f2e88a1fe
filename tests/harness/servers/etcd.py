"""Debian's etcd on loopback, one member or three, with TLS, client certificates and optional users, and its faults."""

import contextlib
import datetime
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from harness.crypto.pki import Authority, CertificateFiles
from harness.ports import free_ports
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.ports import StoreOptions
from shoal.coordinator.store.etcd.store import EtcdStore
from shoal.devstack import etcd as devstack
from shoal.etcd import etcd_pb2, etcd_pb2_grpc
from shoal.types.device import Role
from shoal.wire.identity import store_user_of

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
LISTENS_WITHIN_S = 30.0
T = TypeVar("T")


def etcd_program() -> str:
    """Path of etcd. A missing backend is a failure, never a skip."""
    found = shutil.which("etcd")
    assert found is not None, "etcd is missing: `make packages` installs Debian's etcd-server"
    return found


@dataclass
class EtcdServer:
    """One etcd process; its ports and its data stay the same over restarts."""

    # Member name.
    name: str
    # Its data.
    folder: Path
    # On loopback.
    client_port: int
    # On loopback.
    peer_port: int
    # Its command line.
    command: Sequence[str] = ()
    # None before the first start.
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> str:
        return (self.folder.parent / f"{self.name}.log").read_text()

    def start(self) -> None:
        """Returns at once: a member listens only when a majority runs."""
        assert not self.is_running, "it runs"
        with (self.folder.parent / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self.end(signal.SIGKILL)

    def pause(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
        self.process.wait(timeout=20)


class Etcd:
    """A cluster. quota_bytes: of each member's database; 0: etcd's default. files: a client's credentials; root's with
    scopes.

    scopes: after `authorise`, each user may keep state in its own scope only; without scopes every certificate may do
    everything.
    """

    def __init__(self, folder: Path, *, members: int = 1, quota_bytes: int = 0, scopes: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.scopes: tuple[str, ...] = ()
        self._pki = Authority(folder / "pki", "etcd", CoordinatorClock().wall())
        self._server = self._pki.issue(Role.BROKER, "etcd", valid_s=86400.0 - 3600.0)
        self.files: CertificateFiles = self._pki.issue(Role.COORDINATOR, "coordinator", valid_s=86400.0 - 3600.0)
        self._quota_bytes = quota_bytes
        ports = free_ports(2 * members)
        self.members = [
            EtcdServer(f"m{number}", folder / f"m{number}", ports[2 * number], ports[2 * number + 1])
            for number in range(members)
        ]
        self._set_commands()
        if scopes:
            self.certify_users(scopes)

    def _set_commands(self) -> None:
        cluster = ",".join(f"{each.name}=https://127.0.0.1:{each.peer_port}" for each in self.members)
        for each in self.members:
            each.command = self._command(each, cluster, self._quota_bytes)

    def certify_users(self, scopes: Sequence[str]) -> None:
        """While it does not run: another CA, and certificates of its users, as programs make them."""
        self.scopes = tuple(scopes)
        now = _EPOCH + datetime.timedelta(seconds=CoordinatorClock().wall())
        made = devstack.prepare(self.folder, now, scopes, ("127.0.0.1",))
        self._server, self.files = _files_in(made / devstack.MEMBER, "member-"), _files_in(made / devstack.ROOT)
        self._set_commands()
        self.__dict__.pop("_credentials", None)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(each.endpoint for each in self.members)

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `shoal-coordinator run`."""
        return ("--store", "etcd", *self.flags_as(self.files))

    def flags_as(self, files: CertificateFiles) -> tuple[str, ...]:
        return (
            "--etcd-endpoints", ",".join(self.endpoints), "--etcd-ca", str(files.authority),
            "--etcd-cert", str(files.certificate), "--etcd-key", str(files.key),
        )  # fmt: skip

    def files_of(self, scope: str) -> CertificateFiles:
        """Of its user."""
        return _files_in(self.folder / devstack.FILES / store_user_of(scope))

    def authorise(self) -> dict[str, Any]:
        """Set up users as an operator does, with the program; its output."""
        scopes = [each for scope in self.scopes for each in ("--scope", scope)]
        program = str(Path(sys.executable).with_name("shoal-coordinator"))
        done = subprocess.run(
            [program, "etcd-users", *scopes, *self.flags_as(self.files)],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def start(self) -> None:
        """Returns when every member answers."""
        for each in self.members:
            each.start()
        wait_until(lambda: all(self.status(each).leader for each in self.members), LISTENS_WITHIN_S, "etcd answers")

    def stop(self) -> None:
        for each in self.members:
            each.end(signal.SIGKILL)

    def replace_certificates(self) -> None:
        """While it does not run: another CA, and certificates of it in the same files; it takes no older ones."""
        pki = Authority(self.folder / "pki-anew", "etcd", CoordinatorClock().wall())
        for old, name in ((self._server, (Role.BROKER, "etcd")), (self.files, (Role.COORDINATOR, "coordinator"))):
            new = pki.issue(*name, valid_s=86400.0 - 3600.0)
            for target, content in zip((old.certificate, old.key, old.authority), new.read(), strict=True):
                target.write_bytes(content)
        self.__dict__.pop("_credentials", None)

    def save(self) -> None:
        """While it does not run: a copy of its data, beside it."""
        for each in self.members:
            assert not each.is_running, "it runs"
            shutil.copytree(each.folder, each.folder.with_suffix(".saved"))

    def restore(self) -> None:
        """While it does not run: as it was when it was saved."""
        for each in self.members:
            assert not each.is_running, "it runs"
            shutil.rmtree(each.folder)
            shutil.copytree(each.folder.with_suffix(".saved"), each.folder)

    def wipe(self) -> None:
        """While it does not run: it has never held anything."""
        for each in self.members:
            assert not each.is_running, "it runs"
            shutil.rmtree(each.folder)

    def options(self, directory: Path, scope: str = "", files: CertificateFiles | None = None) -> StoreOptions:
        """scope: of this directory alone when left out; inside the first one's where there are scopes, as its user."""
        own = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
        if self.scopes and not scope:
            files = self.files_of(self.scopes[0])
            own = f"{self.scopes[0]}/{own}"
        files = files or self.files
        return StoreOptions(
            directory,
            scope or own,
            {
                "endpoints": ",".join(self.endpoints),
                "ca": str(files.authority),
                "cert": str(files.certificate),
                "key": str(files.key),
            },
        )

    async def open(self, directory: Path, scope: str = "") -> EtcdStore:
        return await EtcdStore.from_options(self.options(directory, scope))

    def status(self, member: EtcdServer) -> etcd_pb2.StatusResponse:
        return self._maintain(member, lambda stub: stub.Status(etcd_pb2.StatusRequest(), timeout=2.0))

    def leader(self) -> EtcdServer:
        """The member that leads the cluster. Fails when none does."""
        for each in self.members:
            if each.is_running and (status := self.status(each)).leader == status.header.member_id:
                return each
        raise AssertionError("no member leads")

    def compact(self, keep: int = 0) -> None:
        """Forget changes older than the newest `keep` revisions."""
        member = next(each for each in self.members if each.is_running)
        request = etcd_pb2.CompactionRequest(revision=self.status(member).header.revision - keep, physical=True)
        with self._channel(member) as channel:
            etcd_pb2_grpc.KVStub(channel).Compact(request, timeout=10.0)

    def fill(self) -> None:
        """Write under its own key until the space alarm is raised."""
        with self._channel(self.members[0]) as channel:
            for number in range(1000):
                put = etcd_pb2.PutRequest(key=b"filler/%d" % number, value=b"x" * 2**20)
                operation = etcd_pb2.RequestOp(request_put=put)
                try:
                    etcd_pb2_grpc.KVStub(channel).Txn(etcd_pb2.TxnRequest(success=[operation]), timeout=10.0)
                except grpc.RpcError as error:
                    if "space exceeded" not in str(error):
                        raise
                    return
        raise AssertionError("it took a gigabyte")

    def delete_filler(self) -> None:
        """Deletes what `fill` wrote."""
        gone = etcd_pb2.DeleteRangeRequest(key=b"filler/", range_end=b"filler0")
        operation = etcd_pb2.RequestOp(request_delete_range=gone)
        with self._channel(self.members[0]) as channel:
            etcd_pb2_grpc.KVStub(channel).Txn(etcd_pb2.TxnRequest(success=[operation]), timeout=10.0)

    def make_room(self) -> None:
        """Follow the remedy of STORE_FULL: compact, defragment, disarm."""
        self.compact()
        for each in self.members:
            self._maintain(each, lambda stub: stub.Defragment(etcd_pb2.DefragmentRequest(), timeout=10.0))
        raised = self._alarm(etcd_pb2.AlarmRequest(action=etcd_pb2.AlarmRequest.GET)).alarms
        for one in raised:
            disarm = etcd_pb2.AlarmRequest.DEACTIVATE
            self._alarm(etcd_pb2.AlarmRequest(action=disarm, memberID=one.memberID, alarm=one.alarm))

    def _alarm(self, request: etcd_pb2.AlarmRequest) -> etcd_pb2.AlarmResponse:
        return self._maintain(self.members[0], lambda stub: stub.Alarm(request, timeout=5.0))

    @cached_property
    def _credentials(self) -> grpc.ChannelCredentials:
        certificate, key, ca = self.files.read()
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def _channel(self, member: EtcdServer) -> grpc.Channel:
        return grpc.secure_channel(member.endpoint, self._credentials)

    def _maintain(self, member: EtcdServer, ask: Callable[[etcd_pb2_grpc.MaintenanceStub], T]) -> T:
        with self._channel(member) as channel:
            return ask(etcd_pb2_grpc.MaintenanceStub(channel))

    def _command(self, member: EtcdServer, cluster: str, quota_bytes: int) -> list[str]:
        client, peer = f"https://{member.endpoint}", f"https://127.0.0.1:{member.peer_port}"
        certificate, key, ca = (str(each) for each in (self._server.certificate, self._server.key, self._server.ca))
        return [
            etcd_program(), "--name", member.name, "--data-dir", str(member.folder), "--logger", "zap",
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", cluster, "--initial-cluster-token", self.folder.name,
            "--client-cert-auth", "--trusted-ca-file", ca, "--cert-file", certificate, "--key-file", key,
            "--peer-client-cert-auth", "--peer-trusted-ca-file", ca,
            "--peer-cert-file", certificate, "--peer-key-file", key,
            *(("--peer-cert-allowed-cn", devstack.MEMBER_NAME) if self.scopes else ()),
            "--max-txn-ops", "10240", "--max-request-bytes", "10485760",
            *(("--quota-backend-bytes", str(quota_bytes)) if quota_bytes else ()),
        ]  # fmt: skip


@contextlib.contextmanager
def etcd(folder: Path, *, members: int = 1, quota_bytes: int = 0, scopes: Sequence[str] = ()) -> Iterator[Etcd]:
    """One that answers, and has its users; ended on leaving."""
    found = Etcd(folder, members=members, quota_bytes=quota_bytes, scopes=scopes)
    try:
        found.start()
        if scopes:
            found.authorise()
        yield found
    finally:
        found.stop()


def _files_in(folder: Path, stem: str = "") -> CertificateFiles:
    return CertificateFiles(folder / f"{stem}cert.pem", folder / f"{stem}key.pem", folder / "ca.pem")
