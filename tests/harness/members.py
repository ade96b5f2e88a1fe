"""Real agents of a real coordinator, joined as a person would: for tests of who belongs to a region."""

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

from harness.coordinator import REGION, Coordinator
from harness.wait import wait_until
from shoal.client import Context, Region

PATIENCE_S = 30.0


def api(coordinator: Coordinator) -> Region:
    """As the region's first operator."""
    return Region(Context("test", REGION, coordinator.link, str(coordinator.ready["operator_dir"])))


@dataclass(slots=True)
class Member:
    """One `shoal-agent` process and its state directory."""

    coordinator: Coordinator
    state: Path
    name: str
    role: str = "gateway"
    process: subprocess.Popen[bytes] | None = None
    flags: Sequence[str] = ()
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
                token = operator.create_token("agent" if self.role == "node" else self.role, self.name, 300.0).token
        return subprocess.run(
            [*_AGENT, "join", "--coordinator", self.coordinator.enrol, "--state-dir", str(self.state)],
            env={**_environment(), "SHOAL_TOKEN": token},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def belong(self) -> None:
        """As one that joined long ago, but for its files, which the caller makes."""
        told = {"name": self.name, "region": REGION, "role": self.role, "labels": {}}
        told |= {"coordinator": self.coordinator.link, "enrol": self.coordinator.enrol}
        self.identity.mkdir(parents=True, mode=0o700)
        (self.identity / "member.json").write_text(json.dumps(told))

    def start(self) -> None:
        """Returns at once."""
        ports = ("--grpc", "--rest", "--token-port", "--metrics", "--front-metrics")
        command = [*_AGENT, "run", "--role", self.role, "--state-dir", str(self.state), *self.flags]
        for flag in ports:
            command += [flag, "127.0.0.1:0"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=_environment())

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(timeout=30)
            self.process = None

    def twin(self, state: Path) -> "Member":
        """Whoever copied the state directory."""
        shutil.copytree(self.state, state, ignore=shutil.ignore_patterns("run"))
        return Member(self.coordinator, state, self.name, self.role)

    def said(self, event: str) -> list[dict[str, Any]]:
        """Lines of that event in its log, so far."""
        if not self.log.exists():
            return []
        lines = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in lines if line.get("event") == event]

    def until_said(self, event: str, count: int = 1, deadline_s: float = PATIENCE_S, **told: str) -> dict[str, Any]:
        """The newest such line, once there are `count`."""

        def found() -> list[dict[str, Any]]:
            lines = [line for line in self.said(event) if told.items() <= line.items()]
            return lines if len(lines) >= count else []

        return wait_until(found, deadline_s, f"{self.name} to say {event} {count} times {told or ''}")[-1]


_AGENT = (sys.executable, "-m", "shoal.agent.main")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
