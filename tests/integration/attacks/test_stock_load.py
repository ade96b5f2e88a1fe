"""A stock client that sends everything at once, as LoadGen's Offline scenario does."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from harness.clients import triton_burst
from harness.cluster.dataplane_node import DataPlaneNode
from shoal.types.device import Role

COUNT = 4000


@pytest.mark.timeout(240)
async def test_thousands_of_requests_at_once_wait_for_their_turn(node: DataPlaneNode) -> None:
    tenant = node.authority.issue(Role.TENANT, "acme")
    spec = {
        "url": f"localhost:{node.front.config.port}",
        "model": "relu",
        "input": "x",
        "shape": [1, 4],
        "count": COUNT,
        "authority": str(tenant.authority),
        "certificate": str(tenant.certificate),
        "key": str(tenant.key),
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(triton_burst.__file__)), json.dumps(spec), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    assert json.loads(out) == {"answered": COUNT, "errors": {}, "final": [True, None]}
