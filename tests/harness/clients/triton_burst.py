"""A burst of requests by an unmodified tritonclient in its own process: `python triton_burst.py SPEC`.

SPEC is JSON with url, model, authority, certificate, key, name and shape of its FP32 input, and count. Prints JSON: how
many requests were answered, and how often each error came. Then it sends one request over a stream that asks for a
final response.
"""

import asyncio
import json
import queue
import sys
from collections import Counter
from typing import Any


async def main() -> None:
    import numpy as np
    from tritonclient.grpc import aio as triton

    spec: dict[str, Any] = json.loads(sys.argv[1])
    client = triton.InferenceServerClient(
        spec["url"],
        ssl=True,
        root_certificates=spec["authority"],
        private_key=spec["key"],
        certificate_chain=spec["certificate"],
    )
    tensor = triton.InferInput(spec["input"], spec["shape"], "FP32")
    tensor.set_data_from_numpy(np.zeros(spec["shape"], np.float32))

    async def ask() -> str:
        try:
            await client.infer(spec["model"], [tensor])
        except Exception as error:
            return str(error)[:200]
        return ""

    told = Counter(await asyncio.gather(*(ask() for _ in range(spec["count"]))))
    print(json.dumps({"answered": told.pop("", 0), "errors": told, "final": final(spec)}))
    await client.close()


def final(spec: dict[str, Any]) -> list[bool | None]:
    """The parameter `triton_final_response` of answers, with and without the request asking for it."""
    import numpy as np
    from tritonclient import grpc as triton

    client = triton.InferenceServerClient(
        spec["url"],
        ssl=True,
        root_certificates=spec["authority"],
        private_key=spec["key"],
        certificate_chain=spec["certificate"],
    )
    tensor = triton.InferInput(spec["input"], spec["shape"], "FP32")
    tensor.set_data_from_numpy(np.zeros(spec["shape"], np.float32))
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    found: list[bool | None] = []
    for asked in (True, False):
        client.async_stream_infer(spec["model"], [tensor], enable_empty_final_response=asked)
        result, error = answers.get(timeout=20)
        assert error is None, error
        parameters = result.get_response().parameters
        said = "triton_final_response" in parameters
        found.append(parameters["triton_final_response"].bool_param if said else None)
    client.stop_stream()
    return found


if __name__ == "__main__":
    asyncio.run(main())
