"""A region on one machine whose programs are services: installed by `deploy/install.sh`, called as its operator."""

import json
import sys
from pathlib import Path
from typing import Any, Final

from harness.cluster.systemd_machine import SystemdMachine

INSTALL: Final = str(Path(__file__).parents[3] / "deploy" / "install.sh")
AGENT: Final = "shoal-agent.service"
COORDINATOR: Final = "shoal-coordinator.service"
STATE: Final = "/var/lib/shoal-agent"
ENVIRONMENT: Final = "/etc/shoal/agent.env"
_AS_OPERATOR: Final = """
import json, sys
from google.protobuf.json_format import MessageToDict
from shoal.client import Context, RegionClient
with RegionClient(Context("here", "eu", "127.0.0.1:7443", "/var/lib/shoal-coordinator/operator")) as api:
    if sys.argv[1] == "token":
        print(api.create_token("agent", "box", 300.0, allow_labels=["site", "price"]).token)
    else:
        print(json.dumps([MessageToDict(view) for view in api.get("nodes").nodes]))
"""
_LIVES: Final = """
import ssl, sys, urllib.request
trust = ssl.create_default_context(cafile="/var/lib/shoal-agent/identity/ca.pem")
urllib.request.urlopen("https://localhost:8001/v2/health/live", timeout=5, context=trust)
"""


def install(machine: SystemdMachine, *arguments: str, stdin: str = "", script: str = INSTALL) -> str:
    """The script's output. An assertion fails if it refuses."""
    return machine.run_checked("sh", script, *arguments, stdin=stdin)


def join(machine: SystemdMachine, *more: str, script: str = INSTALL) -> str:
    """Join as the node `box`, with a token of the region's operator."""
    given = ("--enrol", "127.0.0.1:7444", "--token-file", "-", "--label", "site=shop", "--label", "price=0.10 USD/h")
    return install(machine, *given, *more, stdin=operator(machine, "token"), script=script)


def operator(machine: SystemdMachine, what: str) -> str:
    return machine.run_checked(sys.executable, "-c", _AS_OPERATOR, what)


def nodes(machine: SystemdMachine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(operator(machine, "nodes"))
    return found


def is_live(machine: SystemdMachine) -> bool:
    return machine.run(sys.executable, "-c", _LIVES).returncode == 0
