"""A coordinator of either role whose store says that what was read by it no longer counts."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from harness.cluster.coordinator import REGION
from harness.ports import free_ports
from harness.wait import until
from shoal.client import Context, RegionClient
from shoal.coordinator.main import federation, process, region
from shoal.coordinator.main.options import CoordinatorConfig, config_of, parser_of
from shoal.coordinator.ports import OpenStore
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, ShoalError, refuse


class Stores:
    """Opens one after the other; `refusals` of them not at first."""

    def __init__(self) -> None:
        self.opened: list[SqliteStore] = []
        self.refusals = 0

    async def open(self, config: CoordinatorConfig) -> OpenStore:
        if self.opened and self.refusals:
            self.refusals -= 1
            raise refuse(Code.STORE_UNAVAILABLE, "nobody answers", "a store", "wait")
        self.opened.append(await SqliteStore.open(config.data_dir / "store"))
        return self.opened[-1]


@pytest.mark.parametrize(("role", "stand"), [("region", region.serve_store), ("federation", federation.serve_store)])
async def test_a_store_that_is_outdated_is_opened_anew_and_writes_go_on_at_the_same_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, stand: process.ServeStore
) -> None:
    stores, stopping = Stores(), asyncio.Event()
    monkeypatch.setattr(process, "open_store", stores.open)
    monkeypatch.setattr(process, "RETRY_S", 0.02)
    link, enrol, metrics = (f"127.0.0.1:{port}" for port in free_ports(3))
    flags = ["--link", link, "--enrol", enrol, "--metrics", metrics, "--data-dir", str(tmp_path / "data")]
    config = config_of(parser_of({}).parse_args(["run", "--role", role, "--region", REGION, *flags]))

    operator = Context("tests", REGION, link, str(config.data_dir / "operator"))

    def token() -> str:
        with RegionClient(operator) as api:
            return api.create_token("operator", valid_s=60.0).id

    async def create_token() -> str:
        return await asyncio.to_thread(token)

    serving = asyncio.create_task(process.serve(config, role, stand, stopping))
    try:
        await until(create_token, 20.0, "it takes a write")
        stores.refusals = 2
        stores.opened[0].stale.set()
        await until(lambda: len(stores.opened) == 2, 10.0, "another store is opened")
        again = await until(create_token, 20.0, "it takes writes again")
        with pytest.raises(ShoalError):
            await stores.opened[0].read("anything")
        assert any(again in record.key for record in await stores.opened[1].scan("tokens/"))
    finally:
        stopping.set()
        await serving


async def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    """A coordinator that had lost its leadership waited for such a task for ever, of a session with its broker."""
    lost = asyncio.Event()

    async def lose_one() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        lost.set()
        await asyncio.Event().wait()

    async def fail() -> None:
        raise OSError("of its own")

    tasks = [asyncio.create_task(each) for each in (lose_one(), fail(), lose_one())]
    await asyncio.sleep(0)  # noqa: TID251 - one turn of the loop
    async with asyncio.timeout(10.0):
        await process.cancel_all(tasks, again_s=0.01)
    assert lost.is_set()
    assert all(each.done() for each in tasks)
