"""Signed models as a publisher and an operator see them: keys, signing, pushing, refusals, and the way back."""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, documents, policy, workload
from harness.models.synthetic import relu
from harness.report import record
from harness.wait import wait_until
from shoal.v1 import operator_pb2

NAME = "signed"


def stdout_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def code(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 255, done.stdout
    return done.stderr.splitlines()[-1].split()[-1].strip("()")  # after lines of progress


def model(folder: Path, name: str) -> Path:
    """The same graph in other bytes."""
    made, path = relu(), folder / f"{name}.onnx"
    made.producer_name = name
    path.write_bytes(made.SerializeToString())
    return path


@pytest.fixture
def publisher(stack: DevStack, tmp_path: Path) -> Iterator[Path]:
    """A private key whose public side the region declares as `shop-release`; nothing is left of it afterwards."""
    key = tmp_path / "shop-release.pem"
    line = stdout_of(stack.shoal("model", "key", str(key), "--new")).strip()
    region = stack.info.stack.region
    stack.apply(f"apiVersion: shoal/v1\nkind: Region\nmetadata: {{name: {region}}}\nspec:\n  keys: [{line}]\n")
    yield key
    stack.delete_workloads(NAME)
    with stack.api() as api:
        api.delete("policy", NAME)
        api.delete("region", region)


def wait_applied(stack: DevStack) -> list[operator_pb2.PlacementView]:
    """Its placements, once they are those of the newest documents."""
    wait_until(lambda: stack.workload(NAME).state == "ready", WAIT_TIMEOUT_S, f"{NAME} to be as applied")
    return stack.wait_serving(NAME)


def test_a38_from_the_publishers_key_to_an_answer_and_back_only_with_leave(
    stack: DevStack, publisher: Path, tmp_path: Path
) -> None:
    old, new = model(tmp_path, "v1"), model(tmp_path, "v2")
    for version, path in (("1", old), ("2", new)):
        stdout_of(
            stack.shoal("model", "sign", str(path), "--key", str(publisher), "--name", "reader", "--version", version)
        )
    asked = policy(NAME, "  require:\n    trust: {signed_model: {keys: [shop-release]}}\n")

    # Unsigned bytes are not placed; a signature that was bent is not taken; the signed model serves.
    (tmp_path / "plain").mkdir()
    stdout_of(stack.shoal("model", "push", str(model(tmp_path / "plain", "unsigned"))))
    stack.apply(documents(asked, workload(NAME, "unsigned", NAME)))
    assert "SIGNATURE_REQUIRED" in stdout_of(stack.shoal("explain", NAME))
    bundle = json.loads((tmp_path / "v1.onnx.sig").read_bytes())
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"]).replace(b'"shoal/version":1', b'"shoal/version":9')
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    (tmp_path / "bent.sig").write_text(json.dumps(bundle))
    bent = stack.shoal("model", "push", str(old), "-s", str(tmp_path / "bent.sig"))
    assert code(bent) == "SIGNATURE_INVALID"
    assert "signed by shop-release (reader v1)" in stdout_of(stack.shoal("model", "push", str(old)))
    stack.apply(documents(asked, workload(NAME, "v1", NAME)))
    stack.wait_serving(NAME)

    # A newer version, and the older one only with leave, which the audit log names.
    stdout_of(stack.shoal("model", "push", str(new)))
    stack.apply(documents(asked, workload(NAME, "v2", NAME)))
    wait_applied(stack)
    older = tmp_path / "back.yaml"
    older.write_text(documents(asked, workload(NAME, "v1", NAME)))
    refused = stack.shoal("apply", "-f", str(older))
    assert refused.returncode not in (0, 1)
    assert "MODEL_ROLLBACK" in refused.stdout + refused.stderr
    assert code(stack.shoal("model", "clear", "reader", "--allow", "2")) == "INVALID_ARGUMENT"
    stdout_of(stack.shoal("model", "clear", "reader", "--allow", "1"))
    stack.apply(older.read_text())
    (row,) = wait_applied(stack)
    assert row.assignment.signed.allow_version == 1
    allowed = [event for event in stack.events() if event.code == "ROLLBACK_ALLOWED"]
    assert [event.message for event in allowed] == ["version 1"]
    assert allowed[0].actor.endswith(stack.info.operator.name) or "operator" in allowed[0].actor
    assert "shop-release (reader v2)" in stdout_of(stack.shoal("model", "ls"))
    record("A38", "P", runs=1)
