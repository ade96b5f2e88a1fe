"""A backup of one store goes into either; what is not whole is served by nobody."""

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import replace as change
from pathlib import Path

import pytest

from harness.servers.etcd import Etcd, etcd
from shoal.coordinator import codec
from shoal.coordinator.api.backup import Backups
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.controllers.log.fencing import KEY, RegionRecord
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.main.restore import RestoreConfig
from shoal.coordinator.main.restore import restore as put_back
from shoal.coordinator.main.serving import RESTORE_KEY, check_restore_complete
from shoal.coordinator.ports import OpenStore, StoreOptions, Transaction
from shoal.coordinator.store.etcd.store import EtcdStore
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, ShoalError

BACKENDS = ("sqlite", "etcd")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


def options(cluster: Etcd, folder: Path) -> StoreOptions:
    """A prefix of etcd for each folder."""
    return cluster.options(folder / "store", f"region/{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}")


async def open_store(backend: str, found: StoreOptions) -> OpenStore:
    return await (SqliteStore if backend == "sqlite" else EtcdStore).from_options(found)


def config(cluster: Etcd, backend: str, folder: Path, copy: Path, *, replace: bool = False) -> RestoreConfig:
    return RestoreConfig("region", "eu", folder, folder, copy, backend, options(cluster, folder), replace)


async def fill_store(store: OpenStore) -> dict[str, bytes]:
    record = codec.dump(RegionRecord("eu", "history-1", 3))
    await store.commit(Transaction({KEY: record, **{f"nodes/{number}": b"%d" % number for number in range(1500)}}))
    return {each.key: each.value for each in await store.scan("nodes/")}


async def write_backup(backend: str, found: StoreOptions, file: Path) -> dict[str, bytes]:
    store = await open_store(backend, found)
    nodes = await fill_store(store)
    backups = Backups("region", "eu", backend, store, CoordinatorClock(), dict, b"")
    file.write_bytes(b"".join([piece async for piece in backups.stream(models=False)]))
    await store.commit(Transaction({"nodes/later": b""}))
    await store.close()
    return nodes


async def nodes_in(backend: str, found: StoreOptions) -> dict[str, bytes]:
    store = await open_store(backend, found)
    await check_restore_complete(store)
    held = {each.key: each.value for each in await store.scan("nodes/")}
    await store.close()
    return held


@pytest.mark.parametrize("source", BACKENDS)
@pytest.mark.parametrize("target", BACKENDS)
def test_a_backup_of_one_store_goes_into_either(cluster: Etcd, tmp_path: Path, source: str, target: str) -> None:
    file, folder = tmp_path / "b.tar", tmp_path / "there"
    nodes = asyncio.run(write_backup(source, options(cluster, tmp_path / "here"), file))
    FileAuthority.open(folder / "ca", "eu", wall=CoordinatorClock().wall(), may_create=True)
    put_back(config(cluster, target, folder, file))
    assert asyncio.run(nodes_in(target, options(cluster, folder))) == nodes
    with pytest.raises(ShoalError) as refused:
        put_back(config(cluster, target, folder, file))
    assert refused.value.code is Code.CONFLICT
    put_back(config(cluster, target, folder, file, replace=True))
    assert asyncio.run(nodes_in(target, options(cluster, folder))) == nodes


def test_what_leads_from_etcd_is_not_pulled_from_under_and_what_was_cut_off_is_done_again(
    cluster: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "b.tar", tmp_path / "there"
    nodes = asyncio.run(write_backup("sqlite", options(cluster, tmp_path / "here"), file))
    FileAuthority.open(folder / "ca", "eu", wall=CoordinatorClock().wall(), may_create=True)
    found = options(cluster, folder)
    leads = change(found, directory=tmp_path / "leader")

    async def restore_while_led() -> None:
        store = await open_store("etcd", leads)
        election = store.election(b"it")
        await election.campaign()
        holding = asyncio.ensure_future(election.wait_lost())
        with pytest.raises(ShoalError) as refused:
            await asyncio.to_thread(put_back, config(cluster, "etcd", folder, file))
        holding.cancel()
        await election.resign()
        await store.close()
        assert refused.value.code is Code.CONFLICT

    monkeypatch.setattr("shoal.coordinator.main.restore.ELECTED_WITHIN_S", 0.5)
    asyncio.run(restore_while_led())
    monkeypatch.undo()

    async def cut_off() -> None:
        store = await open_store("etcd", leads)
        await store.commit(Transaction({RESTORE_KEY: b"b.tar", "nodes/7": b"half"}))
        with pytest.raises(ShoalError) as refused:
            await check_restore_complete(store)
        await store.close()
        assert refused.value.code is Code.STORE_UNAVAILABLE

    asyncio.run(cut_off())
    put_back(config(cluster, "etcd", folder, file))
    assert asyncio.run(nodes_in("etcd", found)) == nodes
