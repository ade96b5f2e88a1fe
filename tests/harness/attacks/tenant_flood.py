"""A tenant that asks for more than its part, in a process of its own.

`python -m harness.attacks.tenant_flood MODEL ADDRESS COUNT CERTIFICATE KEY AUTHORITY` keeps COUNT requests in flight
until its standard input ends: one that is refused is sent again after what it is told, at most `MAX_WAIT_S`. It prints
one JSON line when it begins, and one with what it got at the end.
"""

import asyncio
import json
import os
import resource
import sys
from collections import Counter
from pathlib import Path

from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.crypto.pki import CertificateFiles

CONNECTIONS = 4
MAX_WAIT_S = 0.05
"""It is no client that does as it is told."""
INPUTS = {
    "relu": (Tensor("x", "FP32", (1, 4), bytes(16)),),
    "slow": (Tensor("x", "FP32", (1, 4, 1, 1), bytes(16)),),
}


async def _flood(client: GrpcClient, model: str, seen: Counter[str]) -> None:
    while True:
        try:
            await client.infer(model, INPUTS[model], timeout=60)
            seen["answered"] += 1
            wait_s = 0.0
        except InferenceError as error:
            seen[error.code or str(error.status)] += 1
            wait_s = min(MAX_WAIT_S, float(error.retry_after_ms or 0) / 1e3)
        await asyncio.sleep(wait_s)  # noqa: TID251 - the pace of the flood


async def _main(model: str, address: str, count: int, files: CertificateFiles) -> None:
    authority, port = files.authority.read_bytes(), int(address.rpartition(":")[2])
    clients = [GrpcClient(port, authority, files) for _ in range(CONNECTIONS)]
    seen = Counter[str]()
    tasks = [asyncio.create_task(_flood(clients[number % CONNECTIONS], model, seen)) for number in range(count)]
    print(json.dumps({"event": "attacking"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"seen": seen, "cpu_s": used.ru_utime + used.ru_stime}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    _model, _address, _count, *_files = sys.argv[1:]
    asyncio.run(_main(_model, _address, int(_count), CertificateFiles(*map(Path, _files))))
