"""A worker's service in the test's own process, with a small model loaded."""

from pathlib import Path

from harness.models.synthetic import digest_of, relu
from harness.wait import until
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.frames import FrameMessage
from shoal.agent.packing import pack, unpack
from shoal.agent.worker.messages import LoadOrder, LoadState, WorkerReport
from shoal.agent.worker.providers import CPU_PROVIDER
from shoal.agent.worker.service import WorkerService
from shoal.types.assignment import Work
from shoal.types.units import Bytes


def order_of(folder: Path, assignment: str) -> LoadOrder:
    path, content = folder / "model.onnx", relu().SerializeToString()
    path.write_bytes(content)
    return LoadOrder(
        assignment=assignment, shared_by="t", digest=digest_of(content), path=str(path), provider=CPU_PROVIDER,
        precision="fp32", threads=1, runners=1, queue=1, memory_bytes=10, max_request_bytes=2**20, warm_up_s=60.0,
        work=Work(), weights=1.0, access=DeviceAccess(host_bytes=Bytes(1000)), slots=(),
    )  # fmt: skip


async def load(service: WorkerService, folder: Path, name: str) -> None:
    handlers = service.handlers()
    await handlers["load"](FrameMessage("load", {}, pack(order_of(folder, name))))

    async def is_ready() -> bool:
        report = unpack(WorkerReport, (await handlers["status"](FrameMessage("status"))).payload)
        states = {held.assignment: held.state for held in report.held}
        assert states[name] is not LoadState.FAILED, report
        return states[name] is LoadState.READY

    await until(is_ready, 60, name)
