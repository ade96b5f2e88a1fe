"""What a spare worker holds of memory: nothing of the runtime while the node serves nothing."""

import asyncio
import mmap
from pathlib import Path

from harness.cluster.worker_pool import WorkerPoolHarness
from harness.models.synthetic import relu
from harness.wait import until
from shoal.agent.worker.idle_service import ORDERS, IdleService
from shoal.agent.worker.service import WorkerService

OF_ITS_OWN = {"import", "ping", "status", "stop"}


def spare_maps(pool: WorkerPoolHarness, *, but: int = 0) -> str:
    """The files that the connected spare maps; empty while there is none, or it is `but`."""
    spare = pool.workers._spare.process
    if spare is None or spare.client is None or spare.pid == but:
        return ""
    return Path(f"/proc/{spare.pid}/maps").read_text()


async def test_a_spare_imports_the_runtime_once_its_node_serves(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        await until(lambda: spare_maps(pool), 20, "a spare")
        first = pool.workers._spare.process
        assert first is not None
        assert "libpython" in spare_maps(pool) or "python" in spare_maps(pool)
        assert "onnxruntime" not in spare_maps(pool)
        assert "numpy" not in spare_maps(pool)
        await pool.serve("one", relu().SerializeToString())
        assert pool.pid("one") == first.pid
        assert "onnxruntime" in Path(f"/proc/{first.pid}/maps").read_text()
        await until(lambda: "onnxruntime" in spare_maps(pool, but=first.pid), 20, "the next spare to have the runtime")


def test_every_order_is_known_before_the_runtime() -> None:
    busy = mmap.mmap(-1, 4096)
    service = WorkerService(busy, asyncio.Event())
    assert service.handlers().keys() == {*ORDERS, *OF_ITS_OWN} - {"import"}
    assert IdleService(busy).handlers().keys() == {*ORDERS, *OF_ITS_OWN}
