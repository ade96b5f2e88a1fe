"""A region of one machine whose programs are services: installed by `deploy/install.sh`, asked as its operator."""

import json
import sys
from pathlib import Path
from typing import Any, Final

from harness.machine import Machine

INSTALL: Final = str(Path(__file__).parents[2] / "deploy" / "install.sh")
AGENT: Final = "shoal-agent.service"
COORDINATOR: Final = "shoal-coordinator.service"
STATE: Final = "/var/lib/shoal-agent"
ENVIRONMENT: Final = "/etc/shoal/agent.env"
_AS_OPERATOR: Final = """
import json, sys
from google.protobuf.json_format import MessageToDict
from shoal.client import Context, Region
with Region(Context("here", "eu", "127.0.0.1:7443", "/var/lib/shoal-coordinator/operator")) as api:
    if sys.argv[1] == "token":
        print(api.create_token("agent", "box", 300.0).token)
    else:
        print(json.dumps([MessageToDict(view) for view in api.get("nodes").nodes]))
"""
_LIVES: Final = """
import ssl, sys, urllib.request
trust = ssl.create_default_context(cafile="/var/lib/shoal-agent/identity/ca.pem")
urllib.request.urlopen("https://localhost:8000/v2/health/live", timeout=5, context=trust)
"""


def install(machine: Machine, *arguments: str, given: str = "", script: str = INSTALL) -> str:
    """What it says. An assertion fails when it refuses."""
    return machine.tell("sh", script, *arguments, given=given)


def join(machine: Machine, *more: str, script: str = INSTALL) -> str:
    """As the node `box`, with a token that the region's operator makes."""
    given = ("--enrol", "127.0.0.1:7444", "--token-file", "-", "--label", "site=shop", "--label", "price=0.10 USD/h")
    return install(machine, *given, *more, given=operator(machine, "token"), script=script)


def operator(machine: Machine, what: str) -> str:
    return machine.tell(sys.executable, "-c", _AS_OPERATOR, what)


def nodes(machine: Machine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(operator(machine, "nodes"))
    return found


def lives(machine: Machine) -> bool:
    return machine.run(sys.executable, "-c", _LIVES).returncode == 0
