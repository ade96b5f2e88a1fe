"""Asks a workload from Python: many requests at once over one connection, then a stream.

    python examples/ask.py reader 1,3,48,320

asks the workload that the README's walk applies. It sends zeros of this shape to the workload's only input.
"""

import asyncio
import sys

import numpy as np

from shoal.client import AsyncInferenceClient, Contexts
from shoal.client.tensors import DTYPES


async def main(workload: str, shape: tuple[int, ...]) -> None:
    async with AsyncInferenceClient(Contexts().get()) as client:
        (given,) = (await client.metadata(workload)).inputs
        inputs = {given.name: np.zeros(shape, DTYPES[given.datatype])}
        answers = await asyncio.gather(*(client.infer(workload, inputs, deadline_s=10.0) for _ in range(16)))
        print(f"{len(answers)} answers: {[(name, value.shape) for name, value in answers[0].outputs.items()]}")
        async for answer in client.infer_stream(workload, [inputs] * 4):
            print(f"of a stream: {answer.datatypes}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], tuple(map(int, sys.argv[2].split(",")))))
