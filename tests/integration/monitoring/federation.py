"""Names within the federation of this folder (conftest.py), and requests that its tests share."""

import asyncio
from typing import Final

import pytest

from harness.clients.oip import GrpcClient, InferenceError
from harness.cluster.stack import DevStack, input_of
from shoal.client import Context, RegionClient
from shoal.types.codes import ShoalError
from shoal.wire.enrol import redeem

NODES: Final = ("plain-cpu", "cloud-gpu")
"""Nodes of region `home` that tests place replicas on."""
DISK: Final = "disk"
"""Mount point of the small disk, in its coordinator's folder."""
SLOW: Final = "slow"
"""File beside it that says how slow the disk is (harness.faults.disk)."""


def ask(stack: DevStack, name: str, timeout_s: float = 20.0) -> str:
    """The code of the refusal, or nothing."""

    async def once() -> str:
        files = stack.client_files
        client = GrpcClient(stack.port("gateway", "data"), files.authority.read_bytes(), files)
        try:
            await client.infer(name, input_of(1), timeout=timeout_s)
        except InferenceError as failed:
            return failed.code or str(failed.status)
        finally:
            await client.close()
        return ""

    return asyncio.run(once())


def cause_denials(stack: DevStack, times: int = 1) -> None:
    """A viewer asks for tokens."""
    folder = stack.folder / "viewer"
    if not folder.exists():
        with stack.api() as api:
            token = api.create_token("viewer", "onlooker", 300.0).token
        redeem(stack.info.stack.for_region("home").coordinator_addresses("enrol"), token, "onlooker").write(folder)
    with RegionClient(Context("viewer", "home", stack.info.operator.address, str(folder))) as viewer:
        for _ in range(times):
            with pytest.raises(ShoalError):
                viewer.create_token("tenant", "mine")
