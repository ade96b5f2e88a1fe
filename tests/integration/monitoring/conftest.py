"""A federation of two regions on etcd, a coordinator beside it that keeps backups, a Prometheus that reads them all.

Everything of this folder is `-m long`. The rules are those of the repository, on a shorter clock (`hurried`)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from integration.monitoring.federation import DISK, SLOW

from harness.cluster.coordinator import CoordinatorServer
from harness.cluster.stack import DevStack, region
from harness.crypto.pki import CertificateFiles
from harness.faults.disk import compile_disk, slow_disk_environment, small_disk
from harness.faults.preload import preload_command
from harness.servers.prometheus import RULES, Prometheus, config, scrape_config
from harness.wait import wait_until
from shoal.types.device import Role

EVERY_S: Final = 1.0
"""Between two scrapes, and two looks at the rules."""
WINDOWS: Final = {"5m": "15s", "15m": "60s", "30m": "60s", "1h": "60s"}
"""What the ranges of the rules become."""
FOR: Final = "3s"
FLEET: Final = (("plain-cpu", ""), ("cloud-gpu", "xr5610-l4"), ("small-cpu", "rk3588s"))
"""One tells its power, one is hundreds of times slower than that."""
DISK_BYTES: Final = 32 * 2**20
REACHED_WITHIN_S: Final = 60.0


def shorten_rules(text: str) -> str:
    """The rules with shorter ranges, and `for` of 3 s: what they ask and their bounds are as written."""
    told = yaml.safe_load(text)
    for rule in (rule for group in told["groups"] for rule in group["rules"]):
        rule["expr"] = re.sub(r"(\[|offset )(\w+)", lambda found: found[1] + WINDOWS[found[2]], rule["expr"])
        if "for" in rule:
            rule["for"] = FOR
    return str(yaml.safe_dump(told))


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """`home` and `home-2` with `FLEET` each, in a federation; their state in etcd."""
    folder = tmp_path_factory.mktemp("watched")
    with region(folder, len(FLEET), regions=2, federation=1, store="etcd", fleet=FLEET) as found:
        yield found


@pytest.fixture(scope="package")
def small_disk_coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorServer]:
    """A coordinator of region `eu` on a small disk that can be full or slow; a test starts it anew with the flags that
    it needs."""
    folder = tmp_path_factory.mktemp("keeper").resolve()
    with small_disk(folder / DISK, DISK_BYTES) as disk:
        found = CoordinatorServer(
            folder, command_prefix=preload_command(slow_disk_environment(compile_disk(folder), disk, folder / SLOW))
        )
        found.data.symlink_to(disk)
        found.start(flags=("--archive-dir", str(folder / "archive"), "--archive-every", "3600"))
        yield found
        found.end()


@pytest.fixture(scope="package")
def prometheus(
    stack: DevStack, small_disk_coordinator: CoordinatorServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    folder: Path = tmp_path_factory.mktemp("prometheus")
    small_disk_coordinator.certificate(Role.VIEWER, "prometheus", valid_s=3600.0).write(folder / "eu")
    rules = folder / "rules.yml"
    rules.write_text(shorten_rules(RULES.read_text()))
    found = Prometheus(folder)
    try:
        said: dict[str, Any] = config(stack, every_s=EVERY_S, rule_files=[rules])
        files = CertificateFiles(*(folder / "eu" / name for name in ("cert.pem", "key.pem", "ca.pem")))
        said["scrape_configs"].append(
            scrape_config("eu", files, [("shoal-coordinator", "keeper", small_disk_coordinator.metrics)])
        )
        found.start(said)
        wait_until(lambda: found.query("up") and not found.failing_targets(), REACHED_WITHIN_S, "every page to be read")
        yield found
    finally:
        found.end()
