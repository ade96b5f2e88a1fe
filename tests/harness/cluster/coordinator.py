"""A real coordinator process, and credentials that it accepts."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.v1 import operator_pb2, operator_pb2_grpc
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK_BYTES, channel_options
from shoal.wire.member_files import Enrolled

REGION = "eu"
POLICY = "apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: {name}}}\nspec: {{optimize: {{latency: 1.0}}}}\n"


@dataclass(slots=True)
class CoordinatorServer:
    """A coordinator process; its addresses and data stay the same over restarts."""

    # Holds data, ready line and log.
    folder: Path
    # Region, or the federation's name.
    region: str = REGION
    # region or federation.
    role: str = "region"
    # What the command line begins with, e.g. to enter a namespace.
    command_prefix: Sequence[str] = ()
    # None before the first start.
    process: subprocess.Popen[str] | None = None
    # host:port of link and operator API; port 0 before the first start.
    link: str = "127.0.0.1:0"
    # host:port of enrolment; port 0 before the first start.
    enrol: str = "127.0.0.1:0"
    # host:port of the metrics page; port 0 before the first start.
    metrics: str = "127.0.0.1:0"
    # host:port of the dashboard; port 0 before the first start.
    dashboard: str = "127.0.0.1:0"
    # The process's ready line.
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
        self.dashboard = self.ready.get("dashboard", self.dashboard)

    def refuses_to_start(self, *, deadline_s: float = 60.0) -> int:
        """Its exit status."""
        status = self._start((), deadline_s)
        assert status is not None, "it started"
        return status

    def restore_from(self, copy: Path, *flags: str) -> dict[str, Any]:
        """The output of `restore`, while the coordinator does not run. Replaces an existing store."""
        command = [
            str(Path(sys.executable).with_name("shoal-coordinator")), "restore", "--region", self.region,
            "--data-dir", str(self.data), "--from", str(copy), "--replace", *flags,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def _start(self, flags: Sequence[str], deadline_s: float) -> int | None:
        """None once it listens, else its exit status."""
        command = [
            *self.command_prefix, str(Path(sys.executable).with_name("shoal-coordinator")), "run",
            "--role", self.role, "--region", self.region, "--data-dir", str(self.data),
            "--link", self.link, "--enrol", self.enrol, "--metrics", self.metrics,
            "--dashboard", self.dashboard, *flags,
        ]  # fmt: skip
        out = (self.folder / "ready.json").open("w")
        with out, self.log.open("a") as log:
            self.process = process = subprocess.Popen(command, stdout=out, stderr=log, text=True)

        def is_ready_or_exited() -> bool:
            return process.poll() is not None or (self.folder / "ready.json").read_text().endswith("\n")

        wait_until(is_ready_or_exited, deadline_s, "the coordinator listens or ends")
        return process.poll()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit status, once it has ended."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=20)

    def admin(self) -> Enrolled:
        """The first operator's credentials."""
        return operator_of(self.region, Path(self.ready["operator_dir"]))

    def apply_policy(self, name: str) -> int:
        """Apply a small policy as the first operator; the revision that it made."""
        document = operator_pb2.Document(name=f"{name}.yaml", text=POLICY.format(name=name))
        request = operator_pb2.ApplyRequest(documents=[document])
        reply = operator(self.link, self.admin()).Apply(request, timeout=10)
        assert not reply.problems
        return int(reply.revision)

    def authority(self) -> FileAuthority:
        """The region's own CA, for certificates that no command would issue."""
        return FileAuthority.open(self.data / "ca", self.region, wall=CoordinatorClock().wall(), may_create=False)

    def certificate(self, role: Role, name: str, *, valid_s: float = 600.0, wall: Wall | None = None) -> Enrolled:
        """Valid for `valid_s` from now (or from `wall`)."""
        start = wall if wall is not None else CoordinatorClock().wall()
        return self.authority().enrol_self(role, name, lifetime_s=Seconds(valid_s), wall=start)


def operator_of(region: str, folder: Path, address: str = "") -> Enrolled:
    """The first operator, from the folder that a coordinator wrote. address: of link and API."""
    certificate, ca, key = ((folder / name).read_bytes() for name in ("cert.pem", "ca.pem", "key.pem"))
    return Enrolled(region, Role.OPERATOR, "admin", certificate, ca, address, address, key)


def credentials(enrolled: Enrolled, *, ca: bytes | None = None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(ca or enrolled.ca_pem, enrolled.key_pem, enrolled.certificate_pem)


def channel(address: str, enrolled: Enrolled, *, ca: bytes | None = None, max_bytes: int = LINK_BYTES) -> grpc.Channel:
    """A channel with `enrolled` as the client; it checks that the server is the coordinator of that region."""
    options = channel_options(max_bytes, server_name=dns_of(enrolled.region, Role.COORDINATOR, "coordinator"))
    return grpc.secure_channel(address, credentials(enrolled, ca=ca), options)


def operator(address: str, enrolled: Enrolled) -> operator_pb2_grpc.OperatorStub:
    return operator_pb2_grpc.OperatorStub(channel(address, enrolled))


def refusal_code(call: Callable[[], object]) -> Code | None:
    """The code that a call is refused with; None if it succeeds."""
    try:
        call()
    except grpc.RpcError as error:
        return refusal_of(error).code
    return None
