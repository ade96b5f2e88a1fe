"""An open-loop load by an unmodified tritonclient in its own process: `python triton_load.py SPEC`.

SPEC is JSON with url, model, authority, certificate, key, connections, arrays (a pickle of the inputs and outputs of
each request: the datatype, shape and bytes of `x`, the bytes of the answer) and calls (the file to write).

Each line on standard input is a new rate in requests per second, 0 for none; the load ends with its input. Requests are
sent when they are due, whether or not earlier ones were answered. A `RECORD` is written for each once it is over: when
it was due and when it ended (seconds of the monotonic clock), and its outcome.
"""

import asyncio
import gc
import json
import pickle
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

RECORD: Final = struct.Struct("ddB")
OK, WRONG, FAILED = 0, 1, 2
TIMEOUT_S: Final = 10.0


class OpenLoopLoad:
    def __init__(self, spec: dict[str, Any], triton: Any) -> None:
        files = {
            "root_certificates": spec["authority"],
            "private_key": spec["key"],
            "certificate_chain": spec["certificate"],
        }
        options = [("grpc.ssl_target_name_override", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
        self._clients = [
            triton.InferenceServerClient(spec["url"], ssl=True, **files, channel_args=options)
            for _ in range(spec["connections"])
        ]
        self._model = spec["model"]
        self._questions = []
        for datatype, shape, raw, answer in pickle.loads(Path(spec["arrays"]).read_bytes()):
            tensor = triton.InferInput("x", shape, datatype)
            tensor.set_data_from_numpy(raw)
            self._questions.append(([tensor], answer))
        self._calls = Path(spec["calls"])
        self._out: BinaryIO
        self._failures: TextIO
        self.rate = 0.0
        self.ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._inside: set[asyncio.Task[None]] = set()

    def on_rate_line(self) -> None:
        """A line with a new rate arrived."""
        line = sys.stdin.readline()
        if not line:
            self.ended.set()
        else:
            self.rate = float(line)
        self._changed.set()

    async def run(self) -> None:
        with self._calls.open("wb") as self._out, self._calls.with_suffix(".failures").open("w") as self._failures:
            await self._run()
        for client in self._clients:
            await client.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(0, self.on_rate_line)
        number = 0
        while not self.ended.is_set():
            self._changed.clear()
            if self.rate <= 0:
                self._out.flush()
                self._failures.flush()
                await self._changed.wait()
                continue
            rate, began = self.rate, loop.time()
            sent = 0
            while not self._changed.is_set():
                due = began + sent / rate
                if (ahead := due - loop.time()) > 0:
                    await asyncio.sleep(ahead)  # noqa: TID251 - the load's own pace
                    continue
                task = asyncio.create_task(self._ask(number, due))
                self._inside.add(task)
                task.add_done_callback(self._inside.discard)
                sent, number = sent + 1, number + 1
        if self._inside:
            await asyncio.wait(self._inside)

    async def _ask(self, number: int, due: float) -> None:
        inputs, answer = self._questions[number % len(self._questions)]
        client = self._clients[number % len(self._clients)]
        try:
            result = await client.infer(self._model, inputs, client_timeout=TIMEOUT_S)
            outcome = OK if result.get_response().raw_output_contents[0] == answer else WRONG
        except Exception as error:
            outcome = FAILED
            self._failures.write(f"{due} {error!s:.600}\n")
        self._out.write(RECORD.pack(due, asyncio.get_running_loop().time(), outcome))


async def _main() -> None:
    from tritonclient.grpc import aio as triton

    load = OpenLoopLoad(json.loads(Path(sys.argv[1]).read_text()), triton)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    await load.run()


if __name__ == "__main__":
    asyncio.run(_main())
