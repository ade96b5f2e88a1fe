"""ONNX's own backend models on a region of real processes: inspected, placed, and asked with their own inputs.

Every model that ONNX Runtime runs in this process, and that has neither sequences nor types that the protocol does not
carry, must be accepted, placed, and answer the same bytes through gateway and front, over gRPC and REST. What it does
not load must be refused by a final code. `pytest -m long` takes all of them; 150 that touch as many operators as fit
run each time.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np
import pytest
import yaml

from harness.clients.http2_rest import Http2RestClient
from harness.clients.oip import Answer, GrpcClient, InferenceError, OipClient, RestClient
from harness.cluster.stack import DevStack, region
from harness.models.onnx_backend import Case, RuntimeResult, cases, has_tensors_only, run, tensors
from harness.models.synthetic import digest_of
from harness.wait import until, wait_until
from shoal.types.codes import PERMANENT_LOAD_FAILURES, Code, ShoalError
from shoal.v1 import operator_pb2

SAID = frozenset({Code.MODEL_INVALID, Code.CUSTOM_OP_DENIED})
"""What an inspection may say of them."""
FORESEEN = PERMANENT_LOAD_FAILURES | {Code.PRECISION_DENIED}
"""What a region may say of a model that its only device does not run."""
SEED = 17
FEW, OF_THEM_UNLOADED = 150, 15
BATCH = 50
"""Workloads that are there at one time."""
PLACED_S, HEARD_S = 180.0, 30.0
FAILED_BEFORE = (
    "affine_grid", "attention_4d_diff_heads_mask4d_padded_kv", "col2im", "maxunpool", "reshape_", "resize_", "slice",
    "split_variable", "unsqueeze_", "upsample",
)  # fmt: skip
"""How the names begin of those whose warm-up used to fail: a shape, axes, sizes or scales are an input."""


@dataclass
class Found:
    """What came of them, by name."""

    inspected: Counter[str] = field(default_factory=Counter)
    runnable: set[str] = field(default_factory=set)
    # In bf16, of which the processor's provider has no product: refused with a code.
    denied: set[str] = field(default_factory=set)
    placed: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    equal: set[str] = field(default_factory=set)
    unwarmed: set[str] = field(default_factory=set)
    foreseen: set[str] = field(default_factory=set)
    learnt: set[str] = field(default_factory=set)
    wrong: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = {
            "runnable": self.runnable, "placed": self.placed, "answered": self.answered, "equal": self.equal,
            "without a warm-up": self.unwarmed, "refused before a load": self.foreseen, "by a load": self.learnt,
            "denied for bf16": self.denied,
        }  # fmt: skip
        said = [f"inspected {self.inspected.total()} ({dict(self.inspected)})"]
        return ", ".join((*said, *(f"{name} {len(found)}" for name, found in counts.items())))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    with region(tmp_path_factory.mktemp("backend"), 1) as found:
        yield found


@pytest.mark.timeout(600)
def test_a_hundred_and_fifty_backend_models_answer_as_in_process(stack: DevStack) -> None:
    found = try_cases(stack, _choose(list(cases())))
    print(found)
    assert not found.wrong, _format(found)
    assert found.inspected.total() == FEW
    assert len(found.runnable) == FEW - OF_THEM_UNLOADED
    assert found.equal == found.runnable
    assert len(found.foreseen | found.learnt) == found.inspected["accepted"] - len(found.runnable)
    assert found.foreseen
    assert found.learnt


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_all_backend_models_are_inspected_and_what_runs_answers_as_in_process(stack: DevStack) -> None:
    every = list(cases())
    found = try_cases(stack, every)
    print(found)
    assert not found.wrong, _format(found)
    assert found.inspected.total() == len(every) >= 2033
    assert found.equal == found.answered == found.placed == found.runnable - found.denied
    assert len(found.denied) <= 5, "the runtime has no product in bf16, and widens these few"
    assert len(found.placed) >= 1683


def _choose(every: Sequence[Case]) -> list[Case]:
    """The same at every run: of those that used to fail for their warm-up one of a kind, then what brings operators
    that are not there yet, then any; and some that the runtime does not load."""
    shuffled = [
        every[index] for index in np.random.default_rng(SEED).permutation(len(every)) if has_tensors_only(every[index])
    ]
    before = [
        case
        for start in FAILED_BEFORE
        for case in [case for case in shuffled if case.name.startswith(f"node/test_{start}")][:1]
    ]
    chosen, seen = dict[str, Case](), set[str]()
    open_yet = {case.name: (case, case.operators) for case in shuffled}

    def brings_most() -> Iterator[Case]:
        while open_yet:
            case, operators = max(open_yet.values(), key=lambda each: len(each[1] - seen))
            if operators <= seen:
                return
            del open_yet[case.name]
            yield case

    for case in chain(before, brings_most(), shuffled):
        if len(chosen) == FEW - OF_THEM_UNLOADED:
            break
        if case.name not in chosen and run(case).outputs is not None:
            chosen[case.name] = case
            seen |= case.operators
    unloaded = islice((case for case in shuffled if not run(case).is_loadable), OF_THEM_UNLOADED)
    return [*chosen.values(), *unloaded]


def try_cases(stack: DevStack, chosen: Sequence[Case]) -> Found:
    found = Found()
    with ThreadPoolExecutor(3) as threads:
        said = list(threads.map(lambda numbered: _push(stack, *numbered), enumerate(chosen)))
    wanted: list[tuple[str, Case, RuntimeResult]] = []
    for number, (case, code) in enumerate(zip(chosen, said, strict=True)):
        found.inspected[str(code or "accepted")] += 1
        ran = run(case) if has_tensors_only(case) else None
        runs = ran is not None and ran.outputs is not None
        if runs:
            found.runnable.add(case.name)
        if code is not None and (runs or code not in SAID):
            found.wrong[case.name] = f"its inspection says {code}"
        elif code is None and ran is not None and (runs or not ran.is_loadable):
            wanted.append((f"b{number}", case, ran))
    for first in range(0, len(wanted), BATCH):
        _serve(stack, wanted[first : first + BATCH], found)
    return found


def _push(stack: DevStack, number: int, case: Case) -> Code | None:
    """Why it was refused."""
    path = stack.folder / f"b{number}.onnx"
    path.write_bytes(case.content)
    try:
        with stack.api() as api:
            api.push(path, path.stem)
    except ShoalError as error:
        return error.code
    finally:
        path.unlink()
    return None


def _serve(stack: DevStack, batch: Sequence[tuple[str, Case, RuntimeResult]], found: Found) -> None:
    """Placed together, asked one after the other, and deleted."""
    text = "---\n".join(_document(name, digest_of(case.content)) for name, case, _ in batch)
    stack.apply(text)
    loads = {name for name, _, ran in batch if ran.is_loadable}
    views: dict[str, operator_pb2.WorkloadView] = {}

    def are_settled() -> bool:
        with stack.api() as api:
            views.update({view.workload.name: view for view in api.get("workloads").workloads})
        told = [views[name] for name, _, _ in batch]
        return all(view.state == "ready" or view.final or view.reason.code in PERMANENT_LOAD_FAILURES for view in told)

    with suppress(AssertionError):  # each says below what became of it
        wait_until(are_settled, PLACED_S, f"{len(batch)} workloads to serve or to be refused for good", every_s=0.3)
        wait_until(stack.are_nodes_current, HEARD_S, "every front to have the routes", every_s=0.1)
    placed = {row.assignment.workload.name: row for row in stack.placements()}
    for name, case, _ in batch:
        view = views.get(name)
        code = view.reason.code if view is not None else "unknown"
        if name not in loads:
            if code not in FORESEEN:
                found.wrong[case.name] = f"it does not load here, and the region says {code or 'nothing'}"
            else:
                (found.learnt if name in placed else found.foreseen).add(case.name)
        elif code == Code.PRECISION_DENIED and case.takes_bf16:
            found.denied.add(case.name)
        elif view is None or view.state != "ready":
            found.wrong[case.name] = f"not placed: {code} {view.reason.found if view is not None else ''}"
        else:
            found.placed.add(case.name)
            if not placed[name].observed.measured.samples:
                found.unwarmed.add(case.name)
    asyncio.run(_ask_all(stack, [each for each in batch if each[1].name in found.placed], found))
    with stack.api() as api:
        for name, _, _ in batch:
            api.delete("workload", name, "default")
    wait_until(lambda: not stack.placements(), PLACED_S, "all of them to be gone", every_s=0.2)


def _document(name: str, digest: str) -> str:
    workload = {
        "apiVersion": "shoal/v1",
        "kind": "Workload",
        "metadata": {"name": name},
        "spec": {"model": {"source": digest, "warm_up": "optional"}, "isolation": "shared"},
    }
    return yaml.safe_dump(workload)


async def _ask_all(stack: DevStack, batch: Sequence[tuple[str, Case, RuntimeResult]], found: Found) -> None:
    clients = _clients(stack)
    try:
        for name, case, ran in batch:
            try:
                answers = {way: await _answer(client, name, ran) for way, client in clients.items()}
            except (InferenceError, AssertionError) as failed:
                found.wrong[case.name] = f"not answered: {failed}"[:300]
                continue
            found.answered.add(case.name)
            why = "; ".join(f"{way}: {why}" for way, answer in answers.items() if (why := _differs(answer, ran)))
            if why:
                found.wrong[case.name] = why
            else:
                found.equal.add(case.name)
    finally:
        for client in clients.values():
            await client.close()


def _clients(stack: DevStack) -> dict[str, OipClient]:
    """By way: each protocol, at the gateway and at the front of the node."""
    files = stack.client_files
    authority = files.authority.read_bytes()
    gateway, front = stack.port("gateway", "data"), stack.port(stack.info.stack.agents[0].name, "data")
    return {
        "gateway, gRPC": GrpcClient(gateway, authority, files),
        "gateway, REST over HTTP/2": Http2RestClient(gateway, authority, files),
        "front, gRPC": GrpcClient(front, authority, files),
        "front, REST": RestClient(front, authority, files),
    }


async def _answer(client: OipClient, name: str, ran: RuntimeResult) -> Answer:
    """A front may hear of a route a moment later than its node."""
    await until(lambda: client.model_ready(name), HEARD_S, f"{name} to be ready there", every_s=0.1)
    return await client.infer(name, tensors(ran.inputs))


def _differs(answer: Answer, ran: RuntimeResult) -> str:
    """Of a model that draws lots only names, types and shapes can be the same."""
    assert ran.outputs is not None
    expected: Mapping[str, object] = {each.name: each for each in ran.outputs}
    for each in answer.outputs:
        wanted = next((other for other in ran.outputs if other.name == each.name), None)
        if wanted is None or (each.datatype, each.shape) != (wanted.datatype, wanted.shape):
            return (
                f"{each.name} is {each.datatype} {each.shape}, in process {wanted and (wanted.datatype, wanted.shape)}"
            )
        if ran.is_deterministic and each.raw != wanted.raw:
            return f"{each.name} has other bytes than in process"
    return "" if len(answer.outputs) == len(expected) else f"{len(answer.outputs)} outputs of {len(expected)}"


def _format(found: Found) -> str:
    return f"{found}\n" + "\n".join(f"{name}: {why}" for name, why in sorted(found.wrong.items()))
