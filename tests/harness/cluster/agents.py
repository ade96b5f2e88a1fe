"""Real agents of a real coordinator, joined as a user would: for tests of membership."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.cluster.coordinator import REGION, CoordinatorServer
from harness.wait import wait_until
from shoal.client import Context, RegionClient
from shoal.types.address import HostPort

WAIT_TIMEOUT_S = 30.0


def api(coordinator: CoordinatorServer) -> RegionClient:
    """As the region's first operator."""
    return RegionClient(Context("test", REGION, coordinator.link, str(coordinator.ready["operator_dir"])))


@dataclass(slots=True)
class AgentProcess:
    """One `shoal-agent` process and its state directory."""

    # Whose region it joins.
    coordinator: CoordinatorServer
    # State directory.
    state: Path
    # Node name.
    name: str
    # gateway or node.
    role: str = "gateway"
    # None before the first start.
    process: subprocess.Popen[bytes] | None = None
    # Further flags of `shoal-agent run`.
    flags: Sequence[str] = ()
    # Address that it listens on.
    host: str = "127.0.0.1"
    # What the process said when it was ready; empty before.
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> Path:
        return self.state / "identity"

    @property
    def log(self) -> Path:
        return self.state.with_suffix(".log")

    def join(self, token: str = "") -> subprocess.CompletedProcess[str]:
        if not token:
            with api(self.coordinator) as operator:
                role, labels = ("agent", {"entry": "*"}) if self.role == "node" else (self.role, {})
                token = operator.create_token(role, self.name, 300.0, labels).token
        return subprocess.run(
            [*_AGENT, "join", "--coordinator", self.coordinator.enrol, "--state-dir", str(self.state)],
            env={**_environment(), "SHOAL_TOKEN": token},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def write_membership(self) -> None:
        """Write the record of an earlier join; the caller makes the credential files."""
        told = {"name": self.name, "region": REGION, "role": self.role, "labels": {}}
        told |= {"coordinator": self.coordinator.link, "enrol": self.coordinator.enrol}
        self.identity.mkdir(parents=True, mode=0o700)
        (self.identity / "member.json").write_text(json.dumps(told))

    def start(self) -> None:
        """Returns at once."""
        ports = ("--listen", "--metrics", "--front-metrics")
        command = [*_AGENT, "run", "--role", self.role, "--state-dir", str(self.state), *self.flags]
        for flag in ports:
            command += [flag, str(HostPort(self.host, 0))]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=_environment())

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(timeout=30)
            self.process = None

    def duplicate(self, state: Path) -> "AgentProcess":
        """A copy of the agent, with a copy of its state directory, taken while the agent writes nothing."""
        assert self.process
        self.process.send_signal(signal.SIGSTOP)
        try:
            shutil.copytree(self.state, state, ignore=shutil.ignore_patterns("run"))
        finally:
            self.process.send_signal(signal.SIGCONT)
        return AgentProcess(self.coordinator, state, self.name, self.role)

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        """Lines of that event in its log so far."""
        if not self.log.exists():
            return []
        lines = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in lines if line.get("event") == event]

    def wait_logged(
        self, event: str, count: int = 1, deadline_s: float = WAIT_TIMEOUT_S, **fields: str
    ) -> dict[str, Any]:
        """The newest such line, once there are `count`."""

        def matching_lines() -> list[dict[str, Any]]:
            lines = [line for line in self.log_lines(event) if fields.items() <= line.items()]
            return lines if len(lines) >= count else []

        return wait_until(matching_lines, deadline_s, f"{self.name} to say {event} {count} times {fields or ''}")[-1]


_AGENT = (sys.executable, "-m", "shoal.agent.main")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
