"""A real coordinator process, and whom it lets in."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from harness.wait import wait_until
from shoal.coordinator.clock import SystemClock
from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.v1 import operator_pb2_grpc
from shoal.wire.enrol import Enrolled
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK_BYTES, channel_options

REGION = "eu"


@dataclass(slots=True)
class Coordinator:
    """link, enrol, metrics: addresses of the running process; the same after a restart. before: what its command line
    begins with."""

    folder: Path
    region: str = REGION
    role: str = "region"
    before: Sequence[str] = ()
    process: subprocess.Popen[str] | None = None
    link: str = "127.0.0.1:0"
    enrol: str = "127.0.0.1:0"
    metrics: str = "127.0.0.1:0"
    ready: dict[str, str] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "coordinator.log"

    def start(self, *, flags: Sequence[str] = (), deadline_s: float = 60.0) -> None:
        status = self._start(flags, deadline_s)
        assert status is None, f"it ended with {status}: {self.log.read_text()[-2000:]}"
        self.ready = json.loads((self.folder / "ready.json").read_text())
        self.link, self.enrol, self.metrics = (str(self.ready[name]) for name in ("link", "enrol", "metrics"))

    def refuses_to_start(self, *, deadline_s: float = 60.0) -> int:
        """Its exit status."""
        status = self._start((), deadline_s)
        assert status is not None, "it started"
        return status

    def restored_from(self, copy: Path, *flags: str) -> dict[str, Any]:
        """What `restore` says, while it does not run. A store that is there is replaced."""
        command = [
            str(Path(sys.executable).with_name("shoal-coordinator")), "restore", "--region", self.region,
            "--data-dir", str(self.data), "--from", str(copy), "--replace", *flags,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def _start(self, flags: Sequence[str], deadline_s: float) -> int | None:
        """None when it listens, else its exit status."""
        command = [
            *self.before, str(Path(sys.executable).with_name("shoal-coordinator")), "run",
            "--role", self.role, "--region", self.region, "--data-dir", str(self.data),
            "--link", self.link, "--enrol", self.enrol, "--metrics", self.metrics, *flags,
        ]  # fmt: skip
        out = (self.folder / "ready.json").open("w")
        with out, self.log.open("a") as log:
            self.process = process = subprocess.Popen(command, stdout=out, stderr=log, text=True)

        def settled() -> bool:
            return process.poll() is not None or (self.folder / "ready.json").read_text().endswith("\n")

        wait_until(settled, deadline_s, "the coordinator listens or ends")
        return process.poll()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit status, once it is gone."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=20)

    def authority(self) -> FileAuthority:
        """The region's own CA, for certificates that no command would make."""
        return FileAuthority.open(self.data / "ca", self.region, wall=SystemClock().wall(), may_create=False)

    def certificate(self, role: Role, name: str, *, valid_s: float = 600.0, wall: Wall | None = None) -> Enrolled:
        """Valid for `valid_s` from now (or from `wall`)."""
        start = wall if wall is not None else SystemClock().wall()
        return self.authority().enrol_self(role, name, lifetime_s=Seconds(valid_s), wall=start)


def operator_of(region: str, folder: Path, address: str = "") -> Enrolled:
    """The first operator, by the folder that a coordinator wrote for it. address: of links and the API."""
    certificate, ca, key = ((folder / name).read_bytes() for name in ("cert.pem", "ca.pem", "key.pem"))
    return Enrolled(region, Role.OPERATOR, "admin", certificate, ca, address, address, key)


def credentials(enrolled: Enrolled, *, ca: bytes | None = None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(ca or enrolled.ca_pem, enrolled.key_pem, enrolled.certificate_pem)


def channel(address: str, enrolled: Enrolled, *, ca: bytes | None = None, max_bytes: int = LINK_BYTES) -> grpc.Channel:
    """Its caller is `enrolled`; it checks that the server is the coordinator of that region."""
    options = channel_options(max_bytes, server_name=dns_of(enrolled.region, Role.COORDINATOR, "coordinator"))
    return grpc.secure_channel(address, credentials(enrolled, ca=ca), options)


def operator(address: str, enrolled: Enrolled) -> operator_pb2_grpc.OperatorStub:
    return operator_pb2_grpc.OperatorStub(channel(address, enrolled))
