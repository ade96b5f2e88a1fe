"""Joining a real region: `shoal-agent join`, `run --role gateway`, `doctor`, and its metrics, as a person would."""

import json
import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from harness.metrics import FRONT, SUPERVISOR, check_page
from harness.models.synthetic import relu
from harness.ports import free_ports
from harness.wait import wait_until
from shoal.client.contexts import Context
from shoal.client.region import RegionClient
from shoal.types.codes import Code
from shoal.v1 import operator_pb2
from shoal.wire.certificates import identity_of_pem

NOWHERE = "127.0.0.1:1"
PORTS = [each for flag in ("--listen", "--metrics", "--front-metrics") for each in (flag, "127.0.0.1:0")]


@dataclass
class TownRegion:
    """A coordinator that runs. said: its ready line."""

    folder: Path
    said: dict[str, Any]
    api: RegionClient

    def agent(self, *arguments: str, token: str = "", timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        return subprocess.run(
            [sys.executable, "-m", "shoal.agent.main", *arguments],
            env={**environment, **({"SHOAL_TOKEN": token} if token else {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def join(self, state: Path, token: str, name: str = "gw-1") -> subprocess.CompletedProcess[str]:
        return self.agent(
            "join", "--coordinator", self.said["enrol"], "--name", name, "--state-dir", str(state), token=token
        )


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TownRegion]:
    folder = tmp_path_factory.mktemp("town")
    command = [str(Path(sys.executable).with_name("shoal-coordinator")), "run", "--role", "region", "--region", "eu"]
    command += ["--data-dir", str(folder / "coordinator")]
    command += ["--link", "127.0.0.1:0", "--enrol", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    with (
        (folder / "coordinator.log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "coordinator.log").read_text()
        said = json.loads(line)
        with RegionClient(Context("town", "eu", said["link"], said["operator_dir"])) as api:
            yield TownRegion(folder, said, api)
        process.terminate()


@pytest.mark.parametrize(
    ("use", "named"), [("link", "link port, of agents and operators"), ("metrics", "metrics port")]
)
def test_a_wrong_port_is_told_by_what_it_is(town: TownRegion, tmp_path: Path, use: str, named: str) -> None:
    """And the token is good still, at the right one."""
    token = town.api.create_token("agent", f"strayed-{use}", 300.0).token
    done = town.agent("join", "--coordinator", town.said[use], "--state-dir", str(tmp_path / "a"), token=token)
    assert done.returncode != 0
    assert f"{town.said[use]} is " in done.stderr, done.stderr
    assert named in done.stderr, done.stderr
    assert "enrolment port" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert town.join(tmp_path / "a", token, "").returncode == 0


def test_a_token_makes_one_member_of_the_role_and_name_that_it_names(town: TownRegion, tmp_path: Path) -> None:
    token = town.api.create_token("agent", "edge-7", 300.0).token
    done = town.join(tmp_path / "a", token, "edge-7")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"event": "joined", "node": "edge-7", "region": "eu", "role": "agent"}
    identity = tmp_path / "a" / "identity"
    assert {path.name for path in identity.iterdir()} == {"ca.pem", "cert.pem", "key.pem", "member.json"}
    assert {oct(path.stat().st_mode & 0o777) for path in identity.iterdir()} == {"0o600"}
    assert token not in done.stdout + done.stderr

    again = town.join(tmp_path / "b", token, "edge-7")
    assert again.returncode == 1
    assert again.stderr.endswith(f" ({Code.TOKEN_USED})\n")
    assert not (tmp_path / "b" / "identity" / "cert.pem").exists()
    twice = town.join(tmp_path / "a", town.api.create_token("agent", "edge-8", 300.0).token, "edge-8")
    assert twice.stderr.endswith(f" ({Code.CONFLICT})\n")
    assert "Traceback" not in again.stderr + twice.stderr


def test_a_joiner_that_says_no_name_gets_the_token_s_or_its_host_s(town: TownRegion, tmp_path: Path) -> None:
    bound = town.api.create_token("agent", "edge-12", 300.0).token
    free = town.api.create_token("agent", "", 300.0).token
    names = []
    for folder, token in (("a", bound), ("b", free)):
        state = str(tmp_path / folder)
        done = town.agent("join", "--coordinator", town.said["enrol"], "--state-dir", state, token=token)
        assert done.returncode == 0, done.stderr
        names.append(json.loads(done.stdout)["node"])
    assert names[0] == "edge-12"
    assert names[1] not in ("", "edge-12")


@pytest.mark.parametrize(
    ("bend", "code"),
    [
        (lambda token: "nonsense", Code.TOKEN_INVALID),
        (lambda token: token[:-4] + ("AAAA" if token[-4:] != "AAAA" else "BBBB"), Code.TOKEN_INVALID),
        (lambda token: ".".join([*token.split(".")[:2], "0" * 64, token.split(".")[3]]), Code.CERT_UNTRUSTED),
    ],
    ids=["nonsense", "another secret", "another authority"],
)
def test_a_wrong_token_is_refused_with_its_code(town: TownRegion, tmp_path: Path, bend: Any, code: Code) -> None:
    done = town.join(tmp_path, bend(town.api.create_token("agent", "edge-9", 300.0).token), "edge-9")
    assert done.returncode == 1
    assert done.stderr.endswith(f" ({code})\n")
    assert list(tmp_path.iterdir()) == []


def test_an_operator_s_token_is_not_for_a_device(town: TownRegion, tmp_path: Path) -> None:
    done = town.join(tmp_path, town.api.create_token("viewer", "eve", 300.0).token, "eve")
    assert done.stderr.endswith(f" ({Code.ROLE_DENIED})\n")


def test_nobody_at_the_address(tmp_path: Path, town: TownRegion) -> None:
    token = town.api.create_token("agent", "edge-9", 300.0).token
    done = town.agent("join", "--coordinator", NOWHERE, "--state-dir", str(tmp_path), token=token)
    assert (done.returncode, done.stderr.split()[-1].strip("()")) == (1, Code.COORDINATOR_UNREACHABLE)


def test_a_gateway_runs_is_seen_measured_and_well(town: TownRegion, tmp_path: Path) -> None:
    state = tmp_path / "gw"
    assert (
        town.join(state, town.api.create_token("gateway", "gw-1", 300.0, allow_labels=["site"]).token).returncode == 0
    )
    run = ["run", "--state-dir", str(state), "--label", "site=lab", *PORTS]
    wrong = town.agent(*run)
    assert wrong.stderr.endswith(f" ({Code.ROLE_DENIED})\n"), "its certificate is a gateway's"
    front = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "shoal.agent.main", *run, "--role", "gateway", "--front-metrics", front]
    with (state / "log").open("wb") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (state / "log").read_text()
        said = json.loads(line)
        view = wait_until(
            lambda: next(each for each in town.api.get("nodes").nodes if each.front_ready), 10.0, "the node's view"
        )
        assert (view.node.name, view.node.role, view.node.labels["site"]) == ("gw-1", "gateway", "lab")
        assert view.node.data_address == said["data"]
        assert not list((state / "run").glob("worker-*")), "a gateway runs no worker"

        operator = Path(town.said["operator_dir"])
        metrics = _scrape(said["metrics"], operator)
        check_page(metrics, SUPERVISOR)
        check_page(_scrape(front, operator), FRONT)
        assert "shoal_agent_linked 1.0" in metrics
        assert "shoal_agent_front_ready 1.0" in metrics
        with pytest.raises(OSError):
            _scrape(said["metrics"], operator, certificate=False)
        with pytest.raises(HTTPError) as node:
            _scrape(said["metrics"], state / "identity")
        assert node.value.code == 403, "metrics name every tenant's workloads"

        second = town.agent(*run, "--role", "gateway")
        assert second.stderr.endswith(f" ({Code.CONFLICT})\n"), "one agent a state directory"
        well = town.agent("doctor", "--state-dir", str(state))
        assert well.returncode == 0, well.stdout
        assert all(line.startswith("ok") for line in well.stdout.splitlines())
        (state / "identity" / "key.pem").chmod(0o644)
        ill = town.agent("doctor", "--state-dir", str(state), "--coordinator", NOWHERE)
        assert ill.returncode == 1
        failures = [line.split()[-1].strip("()") for line in ill.stdout.splitlines() if line.startswith("FAIL")]
        assert failures == [Code.ROLE_DENIED, Code.COORDINATOR_UNREACHABLE]
        process.terminate()
        assert process.wait(15) == 0


def test_a_machine_that_finds_a_token_joins_by_itself_once_and_serves(town: TownRegion, tmp_path: Path) -> None:
    state, token_file = tmp_path / "gw", tmp_path / "token"
    run = ["run", "--role", "gateway", "--state-dir", str(state), "--token-file", str(token_file), *PORTS]
    nowhere = town.agent(*run)
    assert nowhere.stderr.endswith(f" ({Code.FIELD_INVALID})\n"), "it does not know whom to ask"
    run += ["--enrol", town.said["enrol"]]
    missing = town.agent(*run)
    assert missing.stderr.endswith(f" ({Code.FIELD_INVALID})\n"), "there is no token"
    assert not state.exists()

    token_file.write_text(town.api.create_token("gateway", "gw-2", 300.0).token + "\n")
    serials = []
    for _ in ("without an identity", "with one, its token used up", "with one, its token gone"):
        command = [sys.executable, "-m", "shoal.agent.main", *run]
        with (
            (tmp_path / "log").open("ab") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process,
        ):
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (tmp_path / "log").read_text()
            assert json.loads(line)["node"] == "gw-2"
            process.terminate()
            assert process.wait(15) == 0
        serials.append(identity_of_pem((state / "identity" / "cert.pem").read_bytes()).serial)
        if len(serials) == 2:
            token_file.unlink()
    assert len(set(serials)) == 1, "it joined once"


def _scrape(address: str, identity: Path, *, certificate: bool = True) -> str:
    context = ssl.create_default_context(cafile=str(identity / "ca.pem"))
    if certificate:
        context.load_cert_chain(identity / "cert.pem", identity / "key.pem")
    with urllib.request.urlopen(f"https://{address}/metrics", context=context, timeout=5) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--listen", "nohost"),
        ("run", "--listen", "a:99999"),
        ("run", "--cache-quota", "4"),
        ("run", "--label", "novalue"),
        ("run", "--role", "king"),
        ("join", "--coordinator", "x:1"),
        (),
    ],
)
def test_a_wrong_command_line_is_told_and_changes_nothing(
    town: TownRegion, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    folder = ("--state-dir", str(tmp_path)) if arguments else ()
    done = town.agent(*arguments, *folder)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_hosts_that_differ_are_refused(town: TownRegion, tmp_path: Path) -> None:
    done = town.agent("run", "--listen", "127.0.0.1:0", "--front-metrics", "0.0.0.0:0", "--state-dir", str(tmp_path))
    assert done.stderr.endswith(f" ({Code.FIELD_INVALID})\n")


RESTRICTED = """apiVersion: shoal/v1
kind: Policy
metadata: {name: trusted-only}
spec: {require: {where: 'has(node.labels.trusted) && node.labels.trusted == "yes"'}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {name: secret}
spec: {model: {source: relu}, policy: trusted-only}
"""


def test_a62_a_node_that_calls_itself_trusted_gets_no_restricted_workload(town: TownRegion, tmp_path: Path) -> None:
    state, model = tmp_path / "liar", tmp_path / "relu.onnx"
    model.write_bytes(relu().SerializeToString())
    town.api.push(model, "relu")
    assert town.join(state, town.api.create_token("agent", "liar", 300.0).token, "liar").returncode == 0
    declares = ["--label", "trusted=yes", "--label", "price=0.001 USD/h"]
    command = [sys.executable, "-m", "shoal.agent.main", "run", "--state-dir", str(state), *declares, *PORTS]
    with (state / "log").open("wb") as log, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log) as process:
        try:
            wait_until(
                lambda: [each for each in town.api.get("devices").devices if each.node == "liar" and each.receipt.node],
                60.0,
                "the node's receipts",
            )
            assert not town.api.apply([operator_pb2.Document(name="w.yaml", text=RESTRICTED)]).problems
            (view,) = town.api.get("nodes", "liar").nodes
            assert dict(view.node.labels) == {"self.trusted": "yes", "self.price": "0.001 USD/h"}
            explained = town.api.explain("default", "secret")
            codes = {candidate.refusal.code for candidate in explained.plan.candidates}
            assert codes == {Code.SELECTOR_MISMATCH}, explained
            assert not town.api.get("placements").placements
            assert not (state / "cache").exists() or not list((state / "cache").rglob("*.onnx")), "it has the model"

            labelled = town.api.label("liar", {"trusted": "yes"})
            assert labelled.node.labels["trusted"] == "yes"
            wait_until(
                lambda: [row for row in town.api.get("placements").placements if row.node == "liar"],
                30.0,
                "the workload on a node that an operator called trusted",
            )
        finally:
            process.terminate()
