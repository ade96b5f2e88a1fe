"""Debian's Mosquitto on loopback, as `shoal-coordinator broker-config` sets it up, and its faults."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness.crypto.pki import Authority, CertificateFiles
from harness.ports import free_ports
from harness.wait import wait_until
from shoal.coordinator.broker import config, rights
from shoal.types.device import Role
from shoal.wire.member_files import Enrolled

LISTENS_WITHIN_S = 10.0


class MosquittoBroker:
    """One broker on `port` of 127.0.0.1; its folder holds what `start` needs.

    nodes: names that have their rights from the start, as if a coordinator had admitted them. A broker that restarts
    empty has the coordinator's rights alone.
    persistence: keeps retained messages over a restart in `mosquitto.db`, which the shipped configuration does not.
    """

    def __init__(
        self, folder: Path, region: str, identity: Enrolled, *, nodes: tuple[str, ...] = (), persistence: bool = False
    ) -> None:
        (self.port,) = free_ports(1)
        self.folder = folder
        self.region = region
        self._process: subprocess.Popen[bytes] | None = None
        settings = config.BrokerConfig(region, "127.0.0.1", self.port, config.current_user(), config.find_plugin())
        config.write(folder, settings, identity)
        if persistence:
            conf = folder / "mosquitto.conf"
            conf.write_text(
                conf.read_text().replace("persistence false", "persistence true\nautosave_on_changes true")
                + "autosave_interval 1\n"
            )
        self.admit(*nodes)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def admit(self, *nodes: str) -> None:
        """Counts from the next start on."""
        (self.folder / "rights.json").write_text(json.dumps(rights.document(self.region, nodes)))
        (self.folder / "dynamic-security.json").unlink(missing_ok=True)

    def start(self) -> None:
        """Returns when it listens. What it had, it has again: retained messages with `persistence`, rights as made."""
        assert not self.is_running, "it runs"
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([str(self.folder / "start")], stdout=log, stderr=log)
        wait_until(self._listens, LISTENS_WITHIN_S, "the broker listens")

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wipe(self) -> None:
        """While it does not run: its messages and the nodes' rights are lost."""
        assert not self.is_running, "it runs"
        for name in ("mosquitto.db", "dynamic-security.json"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "rights.json").write_text(json.dumps(rights.document(self.region)))

    def corrupt(self) -> None:
        """While it does not run: its database and its working copy of the rights are no longer readable."""
        assert not self.is_running, "it runs"
        for name in ("mosquitto.db", "dynamic-security.json"):
            (self.folder / name).write_bytes(bytes(range(256)))

    def refuses_to_start(self) -> bool:
        """It ends by itself instead of listening, as over a corrupt database."""
        with (self.folder / "log").open("ab") as log:
            done = subprocess.run([str(self.folder / "start")], stdout=log, stderr=log, timeout=10, check=False)
        return done.returncode != 0

    def _listens(self) -> bool:
        assert self.is_running, self.log[-400:]
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)
        self._process.wait(timeout=10)


@contextlib.contextmanager
def broker(
    folder: Path, authority: Authority, *, nodes: tuple[str, ...] = (), persistence: bool = False
) -> Iterator[MosquittoBroker]:
    """One that listens, with a certificate of `authority`; ended on leaving."""
    found = MosquittoBroker(folder, authority.region, identity(authority), nodes=nodes, persistence=persistence)
    found.start()
    try:
        yield found
    finally:
        found.stop()


def tls(files: CertificateFiles) -> ssl.SSLContext:
    """A client's context, as aiomqtt (`tls_context=`) and paho (`tls_set_context`) take it."""
    context = ssl.create_default_context(cafile=str(files.authority))
    context.load_cert_chain(str(files.certificate), str(files.key))
    return context


def identity(authority: Authority) -> Enrolled:
    certificate, key, ca = authority.issue(Role.BROKER, config.NAME).read()
    return Enrolled(authority.region, Role.BROKER, config.NAME, certificate, ca, "", "", key)
