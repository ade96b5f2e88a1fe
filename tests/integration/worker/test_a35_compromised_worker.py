"""A35: an operator of the runtime with a memory error. An attacker who takes a worker over has that worker and nothing
else: tried inside the worker itself.

The kernel's refusals are those of this machine. Without Landlock, namespaces, filters or control groups these tests
fail in continuous integration; elsewhere `shoal-agent doctor` reports it.
"""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper

from harness.cluster.worker_pool import WorkerPoolHarness, infer, request
from harness.models import engine_cases, synthetic
from harness.models.synthetic import real_models, tensor
from harness.report import record
from harness.wait import until
from shoal.agent.frames import ConnectionLost
from shoal.agent.ports import WorkerExited, WorkerFailed, WorkerReady
from shoal.agent.worker import confinement
from shoal.agent.worker.cgroups import Cgroups
from shoal.agent.worker.pool_options import PoolOptions
from shoal.types.codes import Code, ShoalError

COMPROMISED_WORKER = Path(__file__).parents[2] / "harness" / "attacks" / "compromised_worker"
ONES = {"x": np.ones(4, np.float32)}
MIB = 2**20
SEED = 35
FUZZED = 16


ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Case:
    content: bytes
    feeds: dict[str, Any]


@pytest.fixture(autouse=True)
def require_confinement() -> None:
    lacking = confinement.unsupported_restrictions()
    if lacking and not os.environ.get("CI"):
        pytest.skip(f"not covered, this machine would not confine: {lacking}")
    assert lacking == ()


@pytest.fixture
def compromised_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker started from here on does the attacker's bidding on a signal."""
    monkeypatch.setenv("PYTHONPATH", str(COMPROMISED_WORKER))


@contextmanager
def bystanders(folder: Path) -> Iterator[dict[str, str]]:
    """What lies and runs on a node beside a worker, and could be guessed."""
    (folder / "key.pem").write_text("a node's key")
    with (
        subprocess.Popen(["/bin/sleep", "60"], env={"SECRET": "x"}) as victim,
        socket.create_server(("127.0.0.1", 0)) as service,
        socket.socket(socket.AF_UNIX) as engine,
    ):
        engine.bind(str(folder / "engine.sock"))
        engine.listen()
        yield {
            "victim": str(victim.pid),
            "key": str(folder / "key.pem"),
            "port": str(service.getsockname()[1]),
            "socket": str(folder / "engine.sock"),
        }
        assert victim.poll() is None, "it could be killed"
        victim.kill()


async def test_a35_a_captured_worker_reaches_nothing(tmp_path: Path, compromised_workers: None) -> None:
    models = tmp_path / "models"
    models.mkdir()
    async with WorkerPoolHarness(tmp_path, models=models) as pool:
        await pool.serve("other", engine_cases.add_one())
        await pool.serve("bad", engine_cases.divide())
        pid, other = pool.pid("bad"), pool.pid("other")
        client = await pool.client("other")
        names = {json.loads(path.read_text())["pid"]: path.stem for path in pool.run.glob("worker-*.json")}
        groups = Cgroups.detect().get(names[pid])
        found_at = pool.run / "slots" / "found.json"
        with bystanders(tmp_path) as told:
            told |= {
                "nonce": str(pool.run / f"{names[other]}.json"),
                "models": str(models),
                "group": str(groups.folders["memory"]),
            }
            (pool.run / "slots" / "told.json").write_text(json.dumps(told))
            os.kill(pid, signal.SIGUSR2)
            await until(found_at.exists, 30, "the captured worker to be done")
        found = json.loads(found_at.read_text())
        assert len(found) == ATTEMPTS
        assert [name for name, how in found.items() if how == "done"] == []
        forked = (groups.folders["pids"] / "cgroup.procs").read_text().split()
        assert len(forked) > 100, "it has forked until it was stopped"
        assert (await infer(client, ONES)).outputs[0].name == "y"
        await client.close()
        await pool.workers.stop("bad")
        await until(lambda: not any(running(int(each)) for each in forked), 10, "what it forked to be gone with it")
        assert pool.pid("other") == other
        record("A35", "P", 1, attempts=len(found), succeeded=0, forked=len(forked))


async def test_a35_a_captured_worker_that_swells_dies_alone(tmp_path: Path, compromised_workers: None) -> None:
    """It lifts its own limit and maps what that does not count: the group's limit stands."""
    async with WorkerPoolHarness(tmp_path, PoolOptions(memory_floor=64 * MIB)) as pool:
        await pool.serve("other", engine_cases.add_one())
        await pool.serve("bad", engine_cases.divide(), memory=MIB)
        pid, other = pool.pid("bad"), pool.pid("other")
        client = await pool.client("other")
        os.kill(pid, signal.SIGUSR1)
        exited = await pool.wait_event("bad", WorkerExited)
        assert exited.refusal.code is Code.OUT_OF_MEMORY
        assert (await infer(client, ONES)).outputs[0].name == "y"
        assert pool.pid("other") == other
        await client.close()
        record("A35", "P", 1, wanted_gib=8, told=exited.refusal.code)


async def test_a35_a_captured_worker_that_lies_about_itself_mutes_no_node(
    tmp_path: Path, compromised_workers: None
) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        await pool.serve("other", engine_cases.add_one())
        await pool.serve("bad", engine_cases.divide())
        other = pool.pid("other")
        os.kill(pool.pid("bad"), signal.SIGWINCH)

        async def is_ended() -> bool:
            stats = await pool.workers.stats()
            assert all(len(each.latencies) < 1_000 for each in stats)
            return not any(each.assignment == "bad" for each in stats)

        await until(is_ended, 20, "it to be ended")
        exited = await pool.wait_event("bad", WorkerExited)
        assert exited.refusal.code is Code.MESSAGE_INVALID
        assert pool.pid("other") == other
        record("A35", "P", 1, lies=1, told=exited.refusal.code)


def one(op: str, feeds: dict[str, Any], outputs: int = 1, domain: str = "", **attributes: Any) -> Case:
    """A graph of one operator, fed with what it must not believe."""
    node = helper.make_node(op, list(feeds), [f"y{n}" for n in range(outputs)], domain=domain, **attributes)
    inputs = [
        tensor(name, [None] * array.ndim, helper.np_dtype_to_tensor_dtype(array.dtype)) for name, array in feeds.items()
    ]
    made = ModelProto(ir_version=10, graph=synthetic.graph([node], inputs, []))
    made.opset_import.add(domain="", version=18)
    made.opset_import.add(domain="ai.onnx.ml", version=3)
    made.opset_import.add(domain="com.microsoft", version=1)
    made.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in node.output)
    return Case(made.SerializeToString(), feeds)


def corpus() -> dict[str, Case]:
    """Operators whose kernels read or write where indices, lengths or attributes say; some releases did not check."""
    f, huge = np.ones((1, 1, 4, 4), np.float32), np.array([2**40, -(2**40)], np.int64)
    ml, ms = "ai.onnx.ml", "com.microsoft"
    tree: dict[str, Any] = {
        "nodes_treeids": [0, 0], "nodes_nodeids": [0, 1], "nodes_featureids": [9999, 0], "nodes_values": [0.5, 0.0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF"], "nodes_truenodeids": [0, 0], "nodes_falsenodeids": [70000, 0],
        "target_treeids": [0], "target_nodeids": [1], "target_ids": [99], "target_weights": [1.0], "n_targets": 1,
    }  # fmt: skip
    return {
        "MaxUnpool": one("MaxUnpool", {"x": f, "i": np.full((1, 1, 4, 4), 2**30, np.int64)}, kernel_shape=[2, 2]),
        "RoiAlign": one("RoiAlign", {"x": f, "r": np.ones((1, 4), np.float32), "b": np.array([2**20], np.int64)}),
        "ReverseSequence": one("ReverseSequence", {"x": f[0, 0], "n": np.full(4, 2**30, np.int64)}),
        "GatherElements": one("GatherElements", {"x": f[0, 0], "i": np.full((4, 4), 2**40, np.int64)}),
        "GatherND": one("GatherND", {"x": f[0, 0], "i": huge[None]}),
        "ScatterND": one("ScatterND", {"x": f[0, 0], "i": huge[None], "u": np.ones(1, np.float32)}),
        "ScatterElements": one("ScatterElements", {"x": f[0, 0], "i": huge[None], "u": np.ones((1, 2), np.float32)}),
        "Slice": one("Slice", {"x": f[0, 0], "s": huge, "e": -huge, "a": np.array([0, 1]), "t": huge}),
        "Pad": one("Pad", {"x": f[0, 0], "p": np.array([-9, 2**33, 9, -(2**33)])}),
        "Col2Im": one("Col2Im", {"x": f[0], "i": np.array([2**31, 2**31]), "b": np.array([2**31, 1])}),
        "OneHot": one("OneHot", {"i": huge, "d": np.array([3], np.int64), "v": np.ones(2, np.float32)}),
        "TfIdf": one(
            "TfIdfVectorizer", {"x": np.array([1, 2], np.int64)}, mode="TF", min_gram_length=1, max_gram_length=2,
            max_skip_count=0, ngram_counts=[0, 2**40], ngram_indexes=[2**40, -5], pool_int64s=[1, 2],
        ),
        "ArrayFeatureExtractor": one("ArrayFeatureExtractor", {"x": f[0, 0], "i": huge}, domain=ml),
        "TreeEnsemble": one("TreeEnsembleRegressor", {"x": np.zeros((1, 2), np.float32)}, domain=ml, **tree),
        "SVMRegressor": one(
            "SVMRegressor", {"x": np.zeros((1, 2), np.float32)}, domain=ml, kernel_type="LINEAR", coefficients=[1.0],
            n_supports=2**20, support_vectors=[1.0], rho=[0.0],
        ),
        "LinearClassifier": one(
            "LinearClassifier", {"x": np.zeros((1, 900), np.float32)}, 2, domain=ml, coefficients=[1.0],
            intercepts=[1.0, 2.0, 3.0], classlabels_ints=[1, 2, 3],
        ),
        "NGramRepeatBlock": one(
            "NGramRepeatBlock", {"i": np.full((1, 4), 2**40, np.int64), "s": np.ones((1, 8), np.float32)}, domain=ms,
            ngram_size=1,
        ),
        "CropAndResize": one(
            "CropAndResize",
            {"x": f, "r": np.ones((1, 4), np.float32), "b": np.array([2**30], np.int32), "c": np.array([2, 2])},
            domain=ms,
        ),
        "Division": Case(engine_cases.divide(), {"x": np.array([-(2**31)], np.int32), "d": np.array([-1], np.int32)}),
        "Division at load": Case(engine_cases.crash_at_load(), {"x": np.ones(1, np.int32)}),
    }  # fmt: skip


def fuzzed_models(number: int) -> dict[str, Case]:
    """Real models with bytes flipped, and their numbers made larger: whatever the parser still takes."""
    rng = np.random.default_rng((SEED, number))
    names = [name for name, path in real_models().items() if path.stat().st_size < 4 * MIB]
    made = {}
    for n in range(number):
        name = names[n % len(names)]
        content = bytearray(real_models()[name].read_bytes())
        for _ in range(int(rng.integers(1, 6))):
            at = int(rng.integers(min(len(content), 200_000)))
            content[at] = int(rng.integers(256))
        feeds = {each: np.ones(4, np.float32) for each in ("x",)}
        made[f"{name} {n}"] = Case(bytes(content), feeds)
    return made


async def outcome(pool: WorkerPoolHarness, name: str, case: Case) -> str:
    """What became of the worker that had this model: the end that it came to is any of them, but it comes to one."""
    await pool.start(name, case.content, memory=64 * MIB)

    def first_event() -> WorkerReady | WorkerFailed | WorkerExited | None:
        told = (WorkerReady, WorkerFailed, WorkerExited)
        return next((event for event in pool.events if isinstance(event, told) and event.assignment == name), None)

    event = await until(first_event, 60, f"{name} to be ready, refused or dead")
    assert event is not None
    if not isinstance(event, WorkerReady):
        return "died at load" if isinstance(event, WorkerExited) else "refused at load"
    client = await pool.client(name)
    try:
        await infer(client, request(case.feeds), deadline_s=5.0)
    except ConnectionLost:
        await pool.wait_event(name, WorkerExited)
        return "died"
    except ShoalError:
        return "refused"
    finally:
        await client.close()
        await pool.workers.stop(name)
    return "answered"


async def count_outcomes(folder: Path, cases: dict[str, Case]) -> dict[str, int]:
    """Each in a worker, while another tenant's worker answers; how often each outcome came."""
    counts: dict[str, int] = {}
    async with WorkerPoolHarness(folder, PoolOptions(load_timeout_s=30, warm_up_s=10)) as pool:
        await pool.serve("other", engine_cases.add_one())
        other = pool.pid("other")
        client = await pool.client("other")
        for name, case in cases.items():
            came = await outcome(pool, name.replace(" ", "-"), case)
            counts[came] = counts.get(came, 0) + 1
            print(f"{name}: {came}")
            answer = await infer(client, ONES)
            assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [2.0] * 4
            assert pool.pid("other") == other, f"{name} reached another tenant's worker"
        await client.close()
    return counts


async def test_a35_operators_that_had_memory_errors(tmp_path: Path) -> None:
    counts = await count_outcomes(tmp_path, corpus())
    assert counts.get("died", 0) + counts.get("died at load", 0) >= 2, "two of them still do, so the test sees deaths"
    record("A35", "P", len(corpus()), others_lost=0, **{name.replace(" ", "_"): n for name, n in counts.items()})


async def test_a35_models_with_bytes_flipped(tmp_path: Path) -> None:
    counts = await count_outcomes(tmp_path, fuzzed_models(FUZZED))
    record("A35", "P", FUZZED, seed=SEED, others_lost=0, **{name.replace(" ", "_"): n for name, n in counts.items()})


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_a35_hundreds_of_models_with_bytes_flipped(tmp_path: Path) -> None:
    counts = await count_outcomes(tmp_path, fuzzed_models(400))
    record("A35", "P", 400, seed=SEED, others_lost=0, **{name.replace(" ", "_"): n for name, n in counts.items()})


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
