"""A real agent (supervisor, front, workers) under a coordinator of the test: serves, is hurt, comes back."""

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import psutil
import pytest
import pytest_asyncio

from harness.builders.agent_values import verification
from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.cluster.agent_host import NODE, REGION, AgentHost, FakeCoordinator, assignment, ready
from harness.crypto.pki import Authority
from harness.measure.contention import RunDelay, startup_slowdown_s
from harness.models import engine_cases
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Observed, PeerTrust, Phase, Version, Work
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.migration import InputsFrom, Verifier
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.workload import WorkloadKey

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.alone]

ATTEMPTS = 3
ONE, TWO, THREE = "a-one", "a-two", "a-three"


@dataclass
class Scene:
    """One agent and its region, with a workload `angle` whose right answer is known."""

    coordinator: FakeCoordinator
    machine: AgentHost
    digest: str
    model: bytes
    input: Tensor
    right: bytes
    generation: int = 0
    clients: list[GrpcClient] = field(default_factory=list)

    def make_assignment(self, name: str, workload: str = "angle", **rule: Any) -> Any:
        return assignment(name, workload, self.digest, len(self.model), **rule)

    def want(self, *assignments: Any) -> None:
        self.generation += 1
        self.coordinator.want(*assignments, generation=self.generation)

    def is_refused_with(self, name: str, code: Code) -> bool:
        return self.coordinator.observed[name].code is code

    async def infer(self, client: GrpcClient, timeout: float = 5.0) -> bytes:
        return (await client.infer("angle", [self.input], timeout=timeout)).outputs[0].raw

    async def serves(self, client: GrpcClient, deadline_s: float, what: str) -> None:
        """Until a request is answered, and rightly."""

        answers: list[bytes] = []

        async def try_infer() -> list[bytes]:
            with suppress(InferenceError):
                answers.append(await self.infer(client, timeout=2.0))
            return answers

        await until(try_infer, deadline_s, what, every_s=0.05)
        assert answers == [self.right]

    def client(self) -> GrpcClient:
        self.clients.append(self.machine.client())
        return self.clients[-1]


def real_model() -> bytes:
    """PP-OCR's text angle classifier, from the rapidocr wheel."""
    spec = find_spec("rapidocr_onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "models" / "ch_ppocr_mobile_v2.0_cls_infer.onnx").read_bytes()


def run_here(model: bytes, image: np.ndarray[Any, Any]) -> bytes:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: image})[0]).tobytes()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("region")
    authority = Authority(folder / "ca", REGION, SystemClock().wall())
    model = real_model()
    digest = f"sha256:{hashlib.sha256(model).hexdigest()}"
    image = np.random.default_rng(7).standard_normal((1, 3, 48, 192), dtype=np.float32)
    coordinator = FakeCoordinator(authority.issue(Role.COORDINATOR, "coordinator"), {digest: model})
    await coordinator.start()
    machine = AgentHost(folder / "edge-1", authority, coordinator.address)
    sent = Tensor("x", "FP32", image.shape, image.tobytes())
    made = Scene(coordinator, machine, digest, model, sent, run_here(model, image))
    try:
        await asyncio.to_thread(machine.start)
        await until(lambda: coordinator.receipts, 40.0, "the device to be measured")
        made.want(made.make_assignment(ONE))
        await ready(coordinator, ONE)
        await made.serves(made.client(), 5.0, "the front to serve it")
        yield made
    finally:
        for client in made.clients:
            await client.close()
        machine.lose_power()
        await coordinator.stop()


async def test_joins_measures_itself_and_serves_a_real_model(scene: Scene) -> None:
    hello = scene.coordinator.hellos[0]
    assert (hello.node.name, hello.node.region, hello.node.role) == (NODE, REGION, Role.AGENT)
    assert [device.name for device in hello.node.devices] == ["cpu0"]
    receipt = scene.coordinator.receipts[0].receipt
    assert (receipt.node, receipt.device, receipt.emulated) == (NODE, "cpu0", False)
    assert receipt.rates.matmul_flops["fp32"] > 1e8
    observed = scene.coordinator.observed[ONE]
    assert observed.measured is not None
    assert observed.measured.latency_p95_s > 0
    assert [tensor.dtype for tensor in observed.inputs] == ["FP32"]
    assert scene.coordinator.version == Version("h-1", 1, scene.generation)
    assert scene.coordinator.front_ready
    assert scene.coordinator.fetched == [(scene.digest, 0)]
    assert await scene.infer(scene.client()) == scene.right


async def test_a_supervisor_holds_no_library_that_its_programs_use(scene: Scene) -> None:
    """It has signed a receipt, read its certificate and found its drivers."""
    mapped = {each.path for each in psutil.Process(scene.machine.pid).memory_maps()}
    assert any("libssl" in path or "_ssl" in path for path in mapped), "its maps are read"
    assert not [path for path in mapped for name in ("cryptography", "onnxruntime", "numpy") if name in path]


async def test_what_another_region_may_call_is_in_the_desired_set_and_what_it_called_in_the_status(
    scene: Scene, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other", "other", SystemClock().wall())
    gateway = other.issue(Role.GATEWAY, "g1")
    client = GrpcClient(scene.machine.port("data"), scene.machine.authority.certificate.read_bytes(), gateway)
    scene.clients.append(client)
    said = {"shoal-hop": "1", "shoal-agreement": "ag-1"}

    async def asks() -> str:
        try:
            answer = await client.infer("theirs", [scene.input], extra_metadata=said, timeout=5.0)
        except InferenceError as error:
            return error.code
        assert answer.outputs[0].raw == scene.right
        return "answered"

    async def answers_with(expected: str) -> bool:
        return await asks() == expected

    assert await asks() == "", "nobody's certificate, as yet"
    here = Endpoint(ONE, NODE, EndpointKind.LOCAL, "", 1.0, EndpointState.READY)
    guests = (Route(WorkloadKey(GUEST_TENANT, "ag-1"), 1, (here,)),)
    trust = PeerTrust("other", (other.certificate.read_text(),), ("g1",), ("ag-1",))
    scene.generation += 1
    scene.coordinator.want(scene.make_assignment(ONE), generation=scene.generation, routes=guests, peers=(trust,))
    await until(lambda: answers_with("answered"), 10, "the other region to be served")
    await until(lambda: scene.coordinator.agreement_counts, 10, "the counts to be reported")
    (counts,) = scene.coordinator.agreement_counts
    assert (counts.agreement, counts.region, counts.requests, counts.errors) == ("ag-1", "other", 1, 0)
    assert 0 < counts.latency_p95_s < 10
    scene.want(scene.make_assignment(ONE))
    loop = asyncio.get_running_loop()
    ended = loop.time()
    await until(lambda: answers_with(Code.REGION_MISMATCH), 10, "the open connection to be refused", every_s=0.05)
    print(f"refused {loop.time() - ended:.3f} s after the desired set was sent")


async def test_what_takes_over_is_verified_before_it_is_ready_and_not_again(scene: Scene) -> None:
    work = Work(shapes={"x": (1, 3, 48, 192)})
    address = f"127.0.0.1:{scene.machine.port('data')}"
    asked = verification(source=ONE, source_node=NODE, source_address=address)
    wrong = engine_cases.perturb_weights(scene.model, 0.2)
    scene.coordinator.models[engine_cases.digest(wrong)] = wrong
    source = scene.make_assignment(ONE)
    right = replace(scene.make_assignment(TWO), verification=asked, work=work)
    other = replace(
        assignment(THREE, "angle", engine_cases.digest(wrong), len(wrong)),
        verification=replace(asked, migration="m-2"),
        work=work,
    )
    try:
        scene.want(source, right)
        await until(lambda: scene.coordinator.phase(TWO) is Phase.VERIFYING, 20.0, "its verification to begin")
        await until(lambda: "ROLE_DENIED" in scene.coordinator.observed[TWO].reason, 10.0, "the source to refuse it")
        scene.want(replace(source, verifiers=(Verifier("m-1", NODE), Verifier("m-2", NODE))), right, other)
        verdict = (await ready(scene.coordinator, TWO)).verdict
        assert verdict is not None
        assert (verdict.passed, verdict.samples, verdict.inputs) == (True, 8, InputsFrom.GENERATED)
        print([(str(drift.metric), drift.worst) for drift in verdict.drifts])
        await until(lambda: scene.coordinator.phase(THREE) is Phase.FAILED, 20.0, "the wrong one to be refused")
        observed = scene.coordinator.observed[THREE]
        assert (observed.code, observed.retry_at) == (Code.VERIFY_FAILED, None)
        assert observed.verdict is not None
        assert not observed.verdict.passed
        assert (THREE, Phase.READY) not in scene.coordinator.phases
        assert scene.coordinator.phase(ONE) is Phase.READY, "its source is untouched"
        await until(lambda: THREE not in scene.machine.workers(), 10.0, "its worker to end")

        scene.want(source, right)  # nobody may ask the source any more
        await until(lambda: scene.coordinator.version == Version("h-1", 1, scene.generation), 10.0, "the set")
        hellos, since = len(scene.coordinator.hellos), len(scene.coordinator.phases)
        scene.machine.kill_supervisor()
        await asyncio.to_thread(scene.machine.start)
        await until(lambda: len(scene.coordinator.hellos) > hellos, 20.0, "the next supervisor")
        await ready(scene.coordinator, TWO)
        assert (TWO, Phase.VERIFYING) not in scene.coordinator.phases[since:], "it passed with the last supervisor"
    finally:
        scene.want(source)
        await until(lambda: TWO not in scene.coordinator.observed, 20.0, "only the first to be left")


async def test_what_is_served_is_counted_and_told(scene: Scene) -> None:
    client = scene.client()
    for _ in range(5):
        assert await scene.infer(client) == scene.right

    def are_requests_counted() -> bool:
        served = scene.coordinator.observed[ONE].served
        return sum(each.requests for each in served) >= 5 and all(each.joules > 0 for each in served)

    await until(are_requests_counted, 5.0, "five requests in the node's status")


async def test_an_older_set_is_refused_and_told(scene: Scene) -> None:
    before = len(scene.coordinator.events)
    held = scene.coordinator.desired
    scene.coordinator.want(generation=scene.generation - 1)
    await until(
        lambda: any(each.code == Code.GENERATION_STALE for each in scene.coordinator.events[before:]), 5.0, "its event"
    )
    assert await scene.infer(scene.client()) == scene.right
    scene.coordinator.desired = held


async def test_a_replica_that_is_not_wanted_drains_and_goes(scene: Scene) -> None:
    phases = len(scene.coordinator.phases)
    scene.want(scene.make_assignment(ONE), scene.make_assignment(TWO, "other"))
    await ready(scene.coordinator, TWO)
    scene.want(scene.make_assignment(ONE))
    await until(lambda: TWO not in scene.coordinator.observed, 10.0, "it to be gone")
    assert (TWO, Phase.DRAINING) in scene.coordinator.phases[phases:]
    await until(lambda: len(scene.machine.workers()) == 1, 5.0, "its worker to be gone")
    assert await scene.infer(scene.client()) == scene.right


async def test_f02_killed_worker_is_back_within_its_load_time_and_half_a_second(scene: Scene) -> None:
    """Killed until it was in time: other programs of the machine make its way back longer, never shorter."""
    client = scene.client()
    clock = SystemClock()
    before, fetched = len(scene.machine.log()), len(scene.coordinator.fetched)
    late: list[tuple[float, float]] = []

    def has_worker_changed(worker: int) -> bool:
        return scene.machine.workers().get(ONE) != worker

    def observed_after(restarts: int) -> Observed | None:
        observed = scene.coordinator.observed[ONE]
        return observed if observed.phase is Phase.READY and observed.restarts == restarts else None

    for restarts in range(1, ATTEMPTS + 1):
        await until(scene.machine.has_spare, 20.0, "the spare worker of an agent at rest")
        worker = scene.machine.workers()[ONE]
        os.kill(worker, signal.SIGKILL)
        killed = clock.now()
        await until(partial(has_worker_changed, worker), 5.0, "it to die")
        await scene.serves(client, 10.0, "an answer again")
        away = clock.now() - killed
        observed = await until(partial(observed_after, restarts), 5.0, "ready in the status")
        assert observed is not None
        assert observed.measured is not None
        late.append((away, observed.measured.load_s))
        if away <= observed.measured.load_s + 0.5:
            break
    events = [each["code"] for each in scene.machine.log_lines("node_event_reported", before) if each["subject"] == ONE]
    assert events == [Code.WORKER_KILLED] * len(late), "seen, and no crash"
    assert len(scene.coordinator.fetched) == fetched, "from the cache"
    away, load_s = late[-1]
    assert away <= load_s + 0.5, late
    record("F02", "P", len(late), away_s=round(away, 3), load_s=round(load_s, 3))


async def test_f03_killed_supervisor_is_replaced_and_nothing_is_reloaded_or_lost(scene: Scene) -> None:
    client = scene.client()
    clock = SystemClock()
    workers, sessions = scene.machine.workers(), len(scene.coordinator.hellos)
    phases, before = len(scene.coordinator.phases), len(scene.machine.log())
    answered: list[bytes] = []
    lost: list[InferenceError] = []
    ended = asyncio.Event()

    async def load() -> None:
        while not ended.is_set():
            try:
                answered.append(await scene.infer(client))
            except InferenceError as error:
                lost.append(error)

    loading = asyncio.create_task(load())
    await until(lambda: len(answered) > 20, 10.0, "load")
    scene.machine.kill_supervisor()
    count = len(answered)
    await until(lambda: len(answered) > count + 20, 10.0, "answers with no supervisor at all")
    others = [process.pid for process in scene.machine.processes()]  # which it asks, as it asks the coordinator here
    started, delay = clock.now(), RunDelay(os.getpid(), *others)
    await asyncio.to_thread(scene.machine.start)
    delay.add(scene.machine.pid)
    await until(lambda: len(scene.coordinator.hellos) > sessions, 30.0, "its session")
    await ready(scene.coordinator, ONE)
    adopted, delayed = clock.now() - started, delay.seconds()
    ended.set()
    await loading
    assert not lost
    assert set(answered) == {scene.right}
    assert scene.machine.workers() == workers
    assert not [each for each in scene.coordinator.phases[phases:] if each[1] is not Phase.READY]
    assert scene.machine.log_lines("agent_started", before)[0]["adopted"] == 1
    slowed = delayed + await asyncio.to_thread(startup_slowdown_s)
    assert adopted - slowed <= 2.0, f"of which {slowed:.2f}s because other programs hold the machine's cores"
    record(
        "F03", "P", 1, sent=len(answered), lost=len(lost), adopted_s=round(adopted, 2), others_took_s=round(slowed, 2)
    )


async def test_a_supervisor_that_cannot_read_its_journal_takes_nothing_away(scene: Scene) -> None:
    """Cut off, too: front and workers go on with what an earlier one told them, until a coordinator says otherwise."""
    client, workers, before = scene.client(), scene.machine.workers(), len(scene.machine.log())
    sessions = len(scene.coordinator.hellos)
    scene.machine.kill_supervisor()
    await scene.coordinator.stop()
    for path in (scene.machine.folder / "journal").glob("desired*"):
        path.write_bytes(b"damaged")
    await asyncio.to_thread(scene.machine.start)
    await until(lambda: scene.machine.log_lines("front_ready", before), 10.0, "the front to be asked")
    for _ in range(100):
        assert await scene.infer(client) == scene.right
    await scene.coordinator.start()
    await until(lambda: len(scene.coordinator.hellos) > sessions, 10.0, "the link to come back")
    assert scene.coordinator.hellos[-1].holds is None
    await ready(scene.coordinator, ONE)
    assert await scene.infer(client) == scene.right
    assert scene.machine.workers() == workers


async def test_f39_a_worker_that_crashes_three_times_is_poisoned_and_nothing_else_is_touched(scene: Scene) -> None:
    scene.want(scene.make_assignment(ONE), scene.make_assignment(TWO, "other"))
    phases, events = len(scene.coordinator.phases), len(scene.coordinator.events)
    mine = scene.machine.workers()[ONE]
    killed: set[int] = set()
    for crash in range(3):
        await until(lambda: scene.coordinator.phase(TWO) is Phase.READY, 20.0, f"ready before crash {crash + 1}")
        await until(lambda: scene.machine.workers().get(TWO, mine) not in {mine, *killed}, 5.0, "its worker")
        killed.add(scene.machine.workers()[TWO])
        os.kill(scene.machine.workers()[TWO], signal.SIGSEGV)
        await until(lambda: scene.coordinator.phase(TWO) is Phase.FAILED, 10.0, f"crash {crash + 1} in the status")
        if crash < 2:
            found = scene.coordinator.observed[TWO]
            assert found.code is Code.WORKER_CRASHED
            assert found.retry_at is not None
    await until(lambda: scene.coordinator.observed[TWO].code is Code.POISONED, 5.0, "poison")
    assert scene.coordinator.observed[TWO].retry_at is None
    assert len(killed) == 3
    await until(lambda: scene.machine.workers() == {ONE: mine}, 5.0, "the last of its workers to be gone")
    assert {phase for name, phase in scene.coordinator.phases[phases:] if name == ONE} <= {Phase.READY}
    assert await scene.infer(scene.client()) == scene.right
    assert any(each.code == Code.POISONED for each in scene.coordinator.events[events:])
    record("F39", "P", 1, crashes=len(killed), other_assignments_touched=0)
    scene.want(scene.make_assignment(ONE))
    await until(lambda: TWO not in scene.coordinator.observed, 10.0, "it to be gone")


async def test_f33_bytes_changed_in_the_cache_are_never_served(scene: Scene) -> None:
    """With the power off one byte changes; the worker finds it on the very bytes that it loads; fetched again."""
    cached = scene.machine.folder / "cache" / scene.digest.removeprefix("sha256:")
    fetched = len(scene.coordinator.fetched)
    scene.machine.lose_power()
    data = bytearray(cached.read_bytes())
    data[len(data) // 2] ^= 1
    cached.write_bytes(data)
    await asyncio.to_thread(scene.machine.start)
    await scene.serves(scene.client(), 20.0, "the right answer again")
    assert len(scene.coordinator.fetched) == fetched + 1
    assert cached.read_bytes() == scene.model
    await until(
        lambda: any(each.code == Code.MODEL_DIGEST for each in scene.coordinator.events), 10.0, "word of the digest"
    )


async def test_a36_other_bytes_on_the_wire_are_never_loaded(scene: Scene) -> None:
    """The coordinator's end sends a model cut, changed or swapped; what came is not kept, and the sound one is."""
    sound = engine_cases.add_one()
    digest = f"sha256:{hashlib.sha256(sound).hexdigest()}"
    cached = scene.machine.folder / "cache" / digest.removeprefix("sha256:")
    wrongs = {
        "changed": sound[:-1] + bytes([sound[-1] ^ 1]),
        "swapped": (scene.model + sound)[: len(sound)],
        "longer": sound + b"\0",
    }
    for what, wrong in wrongs.items():
        scene.coordinator.models[digest] = wrong
        scene.want(scene.make_assignment(ONE), assignment(what, "other", digest, len(sound)))
        await until(
            partial(scene.is_refused_with, what, Code.MODEL_DIGEST),
            20.0,
            f"{what} bytes to be found",
        )
        assert not list(cached.parent.glob(f"{cached.name}*"))
        assert set(scene.machine.workers()) == {ONE}
    scene.coordinator.models[digest] = sound
    scene.want(scene.make_assignment(ONE), assignment(TWO, "other", digest, len(sound)))
    await ready(scene.coordinator, TWO, 60.0)
    assert cached.read_bytes() == sound
    assert scene.coordinator.phase(ONE) is Phase.READY
    record("A36", "P", len(wrongs), loaded=0, kept=0)
    scene.want(scene.make_assignment(ONE))
    await until(lambda: TWO not in scene.coordinator.observed, 10.0, "it to be gone")


async def test_a_reboot_while_cut_off_serves_what_it_last_held(scene: Scene) -> None:
    sessions = len(scene.coordinator.hellos)
    scene.machine.lose_power()
    await scene.coordinator.stop()
    await asyncio.to_thread(scene.machine.start)
    await scene.serves(scene.client(), 20.0, "an answer with no coordinator")
    await scene.coordinator.start()
    await until(lambda: len(scene.coordinator.hellos) > sessions, 10.0, "the link to come back")
    assert scene.coordinator.hellos[-1].holds == Version("h-1", 1, scene.generation)
    await ready(scene.coordinator, ONE)
    assert scene.machine.log_lines("coordinator_connection_failed")[-1]["code"] == Code.COORDINATOR_UNREACHABLE


async def test_a_new_history_stops_nothing(scene: Scene) -> None:
    """The coordinator comes back from an older copy: its set is accepted, and what it does not know goes on."""
    await scene.coordinator.stop()
    scene.coordinator.history, scene.coordinator.desired = "h-2", None
    await scene.coordinator.start()
    scene.coordinator.want(generation=1)
    await until(lambda: scene.coordinator.version == Version("h-2", 1, 1), 10.0, "the new history to be accepted")
    assert scene.coordinator.phase(ONE) is Phase.READY
    assert await scene.infer(scene.client()) == scene.right
    scene.coordinator.want(scene.make_assignment(ONE), generation=2)
    await until(lambda: scene.coordinator.version == Version("h-2", 1, 2), 10.0, "its next set")


async def test_sigterm_drains_and_ends_every_process(scene: Scene) -> None:
    phases = len(scene.coordinator.phases)
    assert await asyncio.to_thread(scene.machine.terminate) == 0
    assert scene.machine.processes() == []
    assert (ONE, Phase.DRAINING) in scene.coordinator.phases[phases:]
