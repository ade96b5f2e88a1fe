"""Logs of devices over their links, and a bundle that holds what helps and no secret."""

import json
import tarfile
from pathlib import Path

import pytest

from harness.cluster.stack import DevStack, documents, on_nodes, policy, workload
from harness.wait import wait_until
from shoal.types.codes import Code, ShoalError

PLANTED = "pLaNtEd-SeCrEt-4242"


def test_a_nodes_log_comes_over_its_link_and_goes_on(stack: DevStack) -> None:
    """Of a worker as long as it runs: so that there is one, something is served."""
    stack.apply(documents(policy("here", on_nodes(["plain-cpu"])), workload("told", "relu", "here")))
    stack.wait_serving("told")
    with stack.api() as api:
        told = [json.loads(text) for text in api.logs("plain-cpu", lines=1000)]
        assert {"supervisor", "worker"} <= {each["process"] for each in told}
        stamps = [each["timestamp"] for each in told]
        assert stamps == sorted(stamps)
        following = api.logs("plain-cpu", lines=1, follow=True)
        newest = next(following)  # a line may have come meanwhile
        assert json.loads(newest)["timestamp"] >= stamps[-1]
        assert newest in list(api.logs("plain-cpu", lines=1000))
        coordinator = [json.loads(text) for text in api.logs(lines=1000)]
        assert {"leadership_acquired"} <= {each["event"] for each in coordinator}
        for node, code in (("nobody", Code.NODE_UNKNOWN),):
            with pytest.raises(ShoalError) as refused:
                list(api.logs(node))
            assert refused.value.code is code
    done = stack.shoal("logs", "plain-cpu", "--tail", "5")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
    stack.delete_workloads("told")


def test_a_bundle_holds_what_helps_and_nothing_that_was_planted(stack: DevStack, tmp_path: Path) -> None:
    """Where strangers' words, or a careless library, would leave them: in a log and in a name of a flag's folder."""
    log = next(stack.folder.rglob("log/coordinator.log"))
    planted = [
        json.dumps({"event": "careless", "headers": f"authorization: Bearer {PLANTED}", "timestamp": "2099-01-01"}),
        json.dumps({"event": "careless", "url": f"https://ana:{PLANTED}@feeds.example/", "timestamp": "2099-01-01"}),
        json.dumps({"event": f"-----BEGIN PRIVATE KEY-----\n{PLANTED}\n", "timestamp": "2099-01-01"}),
    ]
    with log.open("a") as file:
        file.write("".join(f"{line}\n" for line in planted))
    token = stack.shoal("token", "create", "--role", "viewer", "--name", "bundle").stdout
    bundle = tmp_path / "b.tar.gz"
    done = stack.shoal("support-bundle", str(bundle))
    assert done.returncode == 0, done.stderr
    with tarfile.open(bundle) as found:
        parts = {each.name.partition("/")[2]: found.extractfile(each).read() for each in found}  # type: ignore[union-attr]
    whole = b"\n".join(parts.values())
    assert whole.count(b"careless") >= 2, "the lines are there, what was planted is not"
    assert PLANTED.encode() not in whole
    secrets = [each.read_bytes() for each in stack.folder.rglob("key.pem")]
    assert secrets
    assert not any(line in whole for key in secrets for line in key.splitlines() if b"PRIVATE" not in line and line)
    words = [word for word in token.split() if len(word) > 40]
    assert not any(word.encode() in whole for word in words)
    assert b"shoal_coordinator_nodes" in parts["metrics.txt"]
    assert json.loads(parts["coordinator.json"])["flags"]["store"] == "sqlite"
    assert {"doctor.json", "get/nodes.json", "get/events.json", "logs/node-plain-cpu.log"} <= parts.keys()
    assert bundle.stat().st_mode & 0o077 == 0
    wait_until(lambda: not list(tmp_path.glob(".*")), 1.0, "nothing beside it")
