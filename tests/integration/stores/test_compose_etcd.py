"""Item 28: etcd as `docker-compose.yml` runs it, with its flags, files and users, as processes of this machine: each
control plane keeps its state with what is mounted for it, and sees nobody else's. Containers are in `tests/compose`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.ports import free_ports
from harness.servers.etcd import etcd_program
from harness.wait import wait_until
from shoal.coordinator.main.options import parser_of, store_options_of
from shoal.coordinator.ports import StoreOptions, Transaction
from shoal.coordinator.store.etcd.store import EtcdStore
from shoal.types.codes import Code, ShoalError

FILE = Path(__file__).parents[3] / "docker-compose.yml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
MEMBERS = ("etcd-1", "etcd-2", "etcd-3")
KEEPERS = tuple(name for name, one in SERVICES.items() if one.get("environment", {}).get("SHOAL_STORE") == "etcd")
LISTENS_WITHIN_S = 30.0


class Here:
    """The services' settings with the addresses and folders of this machine in the place of containers' own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        numbers = free_ports(2 * len(MEMBERS))
        self.ports = {name: numbers[2 * index : 2 * index + 2] for index, name in enumerate(MEMBERS)}
        made = (each.split(":") for each in SERVICES["etcd-files"]["volumes"])
        self.volumes = {name: folder / path.removeprefix("/stack/") for name, path, *_ in made}

    def environment(self, service: str) -> Mapping[str, str]:
        given = {name: str(value) for name, value in SERVICES[service]["environment"].items()}
        return {name: self._here(service, value) for name, value in given.items()}

    def _here(self, service: str, value: str) -> str:
        mounted = {path: name for name, path, *_ in (each.split(":") for each in SERVICES[service]["volumes"])}
        value = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
        value = value.replace("/srv/etcd", str(self.volumes[mounted["/srv/etcd"]]))
        value = value.replace("/var/lib/shoal", str(self.folder / service))
        for name in MEMBERS:
            client, peer = self.ports[name]
            value = value.replace(f"{name}:2379", f"127.0.0.1:{client}").replace(f"{name}:2380", f"127.0.0.1:{peer}")
        if service in MEMBERS:
            client, peer = self.ports[service]
            value = value.replace("0.0.0.0:2379", f"127.0.0.1:{client}").replace("0.0.0.0:2380", f"127.0.0.1:{peer}")
        return value

    def once(self, service: str, *more: str) -> str:
        """What a container prints that ends when its work is done; it must end well."""
        one = SERVICES[service]
        entry = [each.replace("--out=/stack", f"--out={self.folder}") for each in one["entrypoint"]]
        program = Path(sys.executable).with_name(entry[0])
        entry = [each for each in entry if not each.startswith("--owner=")]
        own = self.environment(service) if "environment" in one else {}
        done = subprocess.run(
            [str(program), *entry[1:], *one["command"], *more],
            env={**os.environ, **own}, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def options(self, service: str, directory: Path) -> StoreOptions:
        parsed = parser_of(self.environment(service)).parse_args(["run", "--data-dir", str(directory)])
        return store_options_of(parsed)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    found = Here(tmp_path_factory.mktemp("compose"))
    found.once("etcd-files", "--host=127.0.0.1")
    with ExitStack() as running:
        for name in MEMBERS:
            (found.folder / name).mkdir()
            log = running.enter_context((found.folder / f"{name}.log").open("wb"))
            own = {each: value for each, value in os.environ.items() if not each.startswith("ETCD")}
            environment = {**own, **found.environment(name)}
            process = subprocess.Popen([etcd_program()], env=environment, stdout=log, stderr=log)
            running.callback(process.wait, 20)
            running.callback(process.kill)
        # As `depends_on` has it of a container that is healthy: this command waits for an answer by itself.
        wait_until(lambda: found.once("etcd-users"), LISTENS_WITHIN_S, "etcd has its users")
        yield found


def test_the_users_are_found_made_at_the_next_start(here: Here) -> None:
    assert json.loads(here.once("etcd-users"))["changed"] == []


@pytest.mark.parametrize("keeper", KEEPERS)
async def test_each_control_plane_keeps_its_state_and_sees_nobody_else_s(
    here: Here, tmp_path: Path, keeper: str
) -> None:
    store = await EtcdStore.from_options(here.options(keeper, tmp_path / keeper))
    await store.commit(Transaction({"nodes/a": keeper.encode()}))
    found = await store.read("nodes/a")
    assert found is not None
    assert found.value == keeper.encode()
    await store.close()
    own = here.options(keeper, tmp_path / "other")
    for other in KEEPERS:
        theirs = here.options(other, tmp_path / "other")
        if other == keeper:
            continue
        abroad = StoreOptions(own.directory, theirs.scope, own.settings)
        with pytest.raises(ShoalError) as refused:
            await EtcdStore.from_options(abroad)
        assert refused.value.code is Code.STORE_DENIED
