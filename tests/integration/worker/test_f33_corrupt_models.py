"""F33: a cached model is corrupt, truncated, of another digest, or changed after the check. A real worker finds it
on the very bytes that it would load."""

from pathlib import Path

import numpy as np
import pytest

from harness.cluster.worker_pool import WorkerPoolHarness, infer
from harness.models import engine_cases
from harness.report import record
from shoal.agent.ports import WorkerFailed, WorkerReady
from shoal.types.codes import Code

SEED = 33


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.long)])
async def test_f33_corrupt_models_are_found_and_none_is_served(tmp_path: Path, count: int) -> None:
    """Cut short, a bit flipped, grown, a byte missing; beside a worker that serves the sound bytes all the while."""
    sound = engine_cases.recogniser().read_bytes()
    rng = np.random.default_rng(SEED)
    async with WorkerPoolHarness(tmp_path) as pool:
        await pool.serve("sound", engine_cases.add_one())
        client = await pool.client("sound")
        pid, found = pool.pid("sound"), 0
        for number in range(count):
            assignment, path = pool.assignment(f"bad-{number}", sound)
            at = int(rng.integers(len(sound)))
            flipped = bytes([sound[at] ^ (1 << int(rng.integers(8)))])
            wrong = (
                sound[:at],
                sound[:at] + flipped + sound[at + 1 :],
                sound + b"\0" * 512,
                sound[:at] + sound[at + 1 :],
            )
            path.write_bytes(wrong[number % 4])
            await pool.workers.start(assignment, str(path))
            failed = await pool.wait_event(f"bad-{number}", WorkerFailed)
            found += failed.refusal.code is Code.MODEL_DIGEST
            assert failed.refusal.asked == assignment.model
            assert pool.workers.local(f"bad-{number}") is None
            path.unlink()
            await pool.workers.stop(f"bad-{number}")
            assert (await infer(client, {"x": np.ones(4, np.float32)})).outputs[0].name == "y"
        assert found == count
        assert not [event for event in pool.events if isinstance(event, WorkerReady)]
        assert pool.pid("sound") == pid
        await client.close()
    record("F33", "P", count, seed=SEED, found=found, served=0)
