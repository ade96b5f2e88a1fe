"""A region is backed up while it serves, its coordinator's machine wiped, and the backup put back: agents go on."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from harness.cluster.coordinator import REGION, CoordinatorServer
from harness.cluster.fleet import AgentFleet
from harness.report import record
from harness.servers.etcd import etcd
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.cli.main import shoal
from shoal.cli.options import SINGULAR
from shoal.client import Context, Contexts, RegionClient
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role

BACK_S = 30.0
MEASURED = {"reading", "last_seen", "epoch", "history", "generation", "term", "prediction", "served", "ingress"}
"""Fields that tell of that moment's measurements and session, or number what is desired: that begins anew."""


@dataclass
class OperatedRegion:
    """A region with agents, and a person's command line for it."""

    coordinator: CoordinatorServer
    fleet: AgentFleet
    home: Path
    flags: Sequence[str]

    def read_all_kinds(self) -> dict[str, Any]:
        """`shoal get KIND -o json` of every kind."""
        found = {}
        for kind in sorted(SINGULAR.keys() - {"events"}):
            done = CliRunner().invoke(shoal, ["get", kind, "-o", "json"], env={"SHOAL_HOME": str(self.home)})
            assert done.exit_code == 0, (kind, done.output, done.exception)
            found[kind] = _lasting(yaml.safe_load(done.stdout))
        return found

    def back_up(self, file: Path, *flags: str) -> str:
        """What the command says. A process of its own, as a person starts it."""
        command = [str(Path(sys.executable).with_name("shoal")), "backup", str(file), *flags]
        environment = {"SHOAL_HOME": str(self.home), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(each) for key, each in value.items() if key not in MEASURED}
    return [_lasting(each) for each in value] if isinstance(value, list) else value


def _differences(path: str, before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from _differences(f"{path}/{key}", before.get(key), after.get(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from _differences(f"{path}/{number}", *pair)
    elif before != after:
        yield f"{path}: {before!r:.60} -> {after!r:.60}"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("correct horse battery staple\n")
    return path


def operated_region(coordinator: CoordinatorServer, folder: Path, flags: Sequence[str]) -> Iterator[OperatedRegion]:
    coordinator.start(flags=flags)
    crew = AgentFleet([coordinator], folder / "crew", agents=1)
    crew.folder.mkdir()
    try:
        crew.start()
        home = folder / "home"
        person = folder / "operator"
        shutil.copytree(str(coordinator.ready["operator_dir"]), person)  # a laptop, which is not wiped
        Contexts(home).save(Context("test", REGION, coordinator.link, str(person)))
        yield OperatedRegion(coordinator, crew, home, flags)
    finally:
        crew.stop()
        coordinator.end(signal.SIGKILL)


def goes_on(region: OperatedRegion, tmp_path: Path, wipe: Any, *restore: str, store: str) -> None:
    """Must-show 5."""
    crew, coordinator, clock = region.fleet, region.coordinator, SystemClock()
    crew.apply_workload(1, "relu")
    crew.wait_settled()
    before, running = region.read_all_kinds(), crew.running_workers()
    file = tmp_path / "region.tar"
    with crew.load() as load:
        began = clock.now()
        told = region.back_up(file, "--models")
        took_s = clock.now() - began
        assert f"of its {store} store" in told
        coordinator.end(signal.SIGKILL)
        wipe()
        said = coordinator.restore_from(file, *restore)
        assert (said["ca"], said["models"]) == ("restored", 2)
        began = clock.now()
        coordinator.start(flags=region.flags)
        crew.wait_settled()
        back_s = clock.now() - began
        load.wait_for(100)
    verdict = load.verdict()
    assert crew.running_workers() == running, "nothing was ended or begun anew"
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict

    def same() -> bool:
        found = list(_differences("", before, region.read_all_kinds()))
        assert not found, found
        return True

    wait_until(same, BACK_S, "every listing says the same", every_s=0.5)
    with crew.api() as api:
        (opened,) = [event.message for event in api.events() if event.code == "HISTORY_OPENED"][1:]
    assert opened == f"restored by hand from {file.name}"
    record(
        "F16", "P", 1, put_back=f"a backup, {store}, all wiped", backup_s=round(took_s, 2),
        backup_bytes=file.stat().st_size, settled_s=round(back_s, 2), restarts=0, requests=verdict.answered,
        requests_lost=0,
    )  # fmt: skip


def test_a_region_is_backed_up_wiped_and_restored_while_its_agents_serve(tmp_path: Path, secret: Path) -> None:
    coordinator, archive = CoordinatorServer(tmp_path / "coordinator"), tmp_path / "archive"
    coordinator.folder.mkdir()
    sealed = ("--backup-key-file", str(secret))
    kept = ("--archive-dir", str(archive), "--archive-every", "1", "--archive-keep", "2")
    for region in operated_region(coordinator, tmp_path, (*sealed, *kept)):
        only_operators(coordinator, tmp_path)
        goes_on(region, tmp_path, lambda: shutil.rmtree(coordinator.data), *sealed, store="sqlite")
        rotates(archive)


def rotates(archive: Path) -> None:
    first = min(archive.glob("region-eu-*.tar"))

    def is_rotated() -> bool:
        found = list(archive.glob("region-eu-*.tar"))
        return len(found) == 2 and first not in found

    wait_until(is_rotated, 20.0, "the newest backups alone", every_s=0.1)


def only_operators(coordinator: CoordinatorServer, tmp_path: Path) -> None:
    (tmp_path / "eve").mkdir()
    coordinator.certificate(Role.VIEWER, "eve").write(tmp_path / "eve")
    with (
        RegionClient(Context("eve", REGION, coordinator.link, str(tmp_path / "eve"))) as api,
        pytest.raises(ShoalError) as no,
    ):
        api.backup(tmp_path / "stolen.tar")
    assert no.value.code is Code.ROLE_DENIED
    assert not list(tmp_path.glob("*stolen*"))


@pytest.mark.long
def test_a_region_in_etcd_is_backed_up_wiped_and_restored(tmp_path: Path, secret: Path) -> None:
    coordinator = CoordinatorServer(tmp_path / "coordinator")
    coordinator.folder.mkdir()
    with etcd(tmp_path / "etcd") as cluster:

        def wipe() -> None:
            cluster.stop()
            cluster.wipe()
            cluster.start()
            shutil.rmtree(coordinator.data)

        flags = (*cluster.flags, "--backup-key-file", str(secret))
        for region in operated_region(coordinator, tmp_path, flags):
            goes_on(region, tmp_path, wipe, *flags, store="etcd")
