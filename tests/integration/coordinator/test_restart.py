"""What a coordinator finds again after SIGKILL, after damage, and on a disk of a few megabytes."""

import errno
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from harness.cluster.coordinator import REGION, CoordinatorServer, operator, operator_of
from harness.wait import wait_until
from shoal.types.codes import Code
from shoal.v1 import operator_pb2 as api
from shoal.wire.enrol import Enrolled
from shoal.wire.status import refusal_of

POLICY = "apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: {name}}}\nspec: {{optimize: {{latency: 1.0}}}}\n"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorServer]:
    running = CoordinatorServer(tmp_path)
    yield running
    running.end()


def admin(coordinator: CoordinatorServer) -> Enrolled:
    return operator_of(REGION, Path(coordinator.ready["operator_dir"]))


def apply(coordinator: CoordinatorServer, name: str) -> int:
    document = api.Document(name=f"{name}.yaml", text=POLICY.format(name=name))
    reply = operator(coordinator.link, admin(coordinator)).Apply(api.ApplyRequest(documents=[document]), timeout=10)
    assert not reply.problems
    return int(reply.revision)


def policies(coordinator: CoordinatorServer) -> list[str]:
    reply = operator(coordinator.link, admin(coordinator)).Get(api.GetRequest(kind="policies"), timeout=10)
    return [document.name for document in reply.documents]


def takes_writes(coordinator: CoordinatorServer) -> bool:
    """As it says to Prometheus, and to `shoal doctor`, which agree."""
    stub = operator(coordinator.link, admin(coordinator))
    told = stub.GetDiagnostics(api.GetDiagnosticsRequest(), timeout=10).metrics
    (check,) = (each for each in stub.Doctor(api.DoctorRequest(), timeout=10).checks if "takes writes" in each.name)
    writable = "shoal_coordinator_store_writable 1.0" in told.splitlines()
    assert writable == bool(check.ok)
    return writable


def codes(coordinator: CoordinatorServer) -> list[str]:
    stub = operator(coordinator.link, admin(coordinator))
    return [event.code for event in stub.Events(api.EventsRequest(), timeout=10)]


def test_f06_every_acknowledged_write_survives_sigkill(coordinator: CoordinatorServer) -> None:
    """6 kills, each right after an acknowledgement; history, CA and addresses stay."""
    coordinator.start()
    stub = operator(coordinator.link, admin(coordinator))
    history = stub.WhoAmI(api.WhoAmIRequest(), timeout=5).history
    applied: list[str] = []
    for number in range(6):
        apply(coordinator, f"p{number:02}")
        applied.append(f"p{number:02}")
        assert coordinator.end(signal.SIGKILL) == -signal.SIGKILL
        coordinator.start()
        assert policies(coordinator) == applied
    stub = operator(coordinator.link, admin(coordinator))
    assert stub.WhoAmI(api.WhoAmIRequest(), timeout=5).history == history
    assert codes(coordinator).count("APPLIED") == 6
    checks = stub.Doctor(api.DoctorRequest(), timeout=5).checks
    assert [check.name for check in checks if not check.ok] == ["a gateway answers"], "there is none in this test"


def test_f15_a_damaged_store_is_restored_loudly_and_opens_a_new_history(coordinator: CoordinatorServer) -> None:
    coordinator.start(flags=["--backup-every", "0.2"])
    apply(coordinator, "kept")
    before = operator(coordinator.link, admin(coordinator)).WhoAmI(api.WhoAmIRequest(), timeout=5).history
    assert coordinator.end() == 0
    state = coordinator.data / "store" / "state.db"
    data = bytearray(state.read_bytes())
    data[100:4096] = bytes(3996)
    state.write_bytes(data)
    coordinator.start()
    assert policies(coordinator) == ["kept"]
    stub = operator(coordinator.link, admin(coordinator))
    assert stub.WhoAmI(api.WhoAmIRequest(), timeout=5).history != before
    told = [check for check in stub.Doctor(api.DoctorRequest(), timeout=5).checks if not check.ok]
    assert "STORE_CORRUPT" in [check.refusal.code for check in told]
    assert "HISTORY_OPENED" in codes(coordinator)
    assert "restored_store_detected" in coordinator.log.read_text()
    assert (coordinator.data / "store" / "state.db.corrupt-1").exists()


def test_f15_without_a_copy_it_refuses_to_start_and_says_why(coordinator: CoordinatorServer) -> None:
    coordinator.start(flags=["--backup-every", "3600"])
    coordinator.end(signal.SIGKILL)
    shutil.rmtree(coordinator.data / "store" / "backups", ignore_errors=True)
    (coordinator.data / "store" / "state.db").write_bytes(b"not a database")
    for _ in range(2):
        assert coordinator.refuses_to_start() == 1, "an exit status for the service manager, not a crash"
    assert Code.STATE_CORRUPT in coordinator.log.read_text()
    assert "Traceback" not in coordinator.log.read_text()


def test_f15_a_lost_ca_is_never_replaced_silently(coordinator: CoordinatorServer) -> None:
    coordinator.start()
    assert coordinator.end() == 0
    shutil.rmtree(coordinator.data / "ca")
    assert coordinator.refuses_to_start() == 1
    assert Code.STATE_CORRUPT in coordinator.log.read_text()
    assert not (coordinator.data / "ca").exists()


def test_a_second_coordinator_on_the_same_directory_is_refused(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    coordinator.start()
    (tmp_path / "second").mkdir()
    second = CoordinatorServer(tmp_path / "second")
    (tmp_path / "second" / "data").symlink_to(coordinator.data)
    assert second.refuses_to_start() == 1
    assert Code.STORE_UNAVAILABLE in second.log.read_text()
    apply(coordinator, "still")


def fill(path: Path) -> None:
    """Until the disk takes no more."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def refusal(call: Callable[[], object]) -> Code | None:
    try:
        call()
    except grpc.RpcError as error:
        return refusal_of(error).code
    return None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB, in the tests' own mount namespace where mounting is allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], capture_output=True, text=True)
    assert mounted.returncode == 0, f"this row needs a small file system: {mounted.stderr}"
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_f13_on_a_full_disk_writes_are_refused_reads_and_deletes_go_on(
    coordinator: CoordinatorServer, small_disk: Path
) -> None:
    coordinator.data.symlink_to(small_disk)
    coordinator.start(flags=["--backup-every", "3600"])
    apply(coordinator, "first")
    assert takes_writes(coordinator)
    hog = small_disk / "hog"
    fill(hog)
    refused = [refusal(partial(apply, coordinator, f"more-{number}")) for number in range(200)]
    assert refused.count(Code.STORE_FULL) > 100, "the disk was never full"
    assert set(refused) <= {None, Code.STORE_FULL}
    assert not takes_writes(coordinator)
    assert "first" in policies(coordinator)
    before = policies(coordinator)
    assert before == sorted(["first", *(f"more-{number}" for number, why in enumerate(refused) if why is None)])
    stub = operator(coordinator.link, admin(coordinator))
    stub.Delete(api.DeleteRequest(kind="policy", name=before.pop()), timeout=10)
    assert policies(coordinator) == before
    another = small_disk / "another"
    fill(another)
    assert [refusal(partial(apply, coordinator, f"again-{number}")) for number in range(200)].count(Code.STORE_FULL)
    assert not takes_writes(coordinator)
    before = policies(coordinator)
    hog.unlink()
    another.unlink()
    wait_until(lambda: takes_writes(coordinator), 20, "it to find room though nobody writes")
    assert "STORE_BACK" in codes(coordinator)
    wait_until(lambda: apply(coordinator, "after"), 10, "writes resume by themselves")
    assert policies(coordinator) == sorted([*before, "after"])
    assert coordinator.end(signal.SIGKILL) == -signal.SIGKILL
    coordinator.start()
    assert "after" in policies(coordinator)
