"""A move between two runtimes: from ONNX Runtime's own provider to OpenVINO's, with real models and workers.

OpenVINO's build of ONNX Runtime takes the place of the plain one, so its workers run from an environment of their own,
which `make openvino` makes.
"""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.builders.agent_values import verification
from harness.cluster.dataplane_node import CPU, DataPlaneNode
from harness.crypto.pki import Authority
from harness.models import engine_cases
from shoal.agent.clock import SystemClock
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.ports import VerificationSource
from shoal.agent.worker.pool import ProcessWorkers
from shoal.agent.worker.pool_options import PoolOptions
from shoal.coordinator.core.graph import profile_of
from shoal.coordinator.core.migration.tolerance import default
from shoal.coordinator.core.prediction.demand import work_of
from shoal.types.assignment import Work
from shoal.types.codes import Code
from shoal.types.migration import Metric, Verifier
from shoal.types.profile import ModelProfile
from shoal.types.workload import WorkloadKey

pytestmark = pytest.mark.long
PYTHON = Path(__file__).resolve().parents[3] / ".venv-openvino" / "bin" / "python"
NO_SPARE = PoolOptions(keep_spare=False)
OPENVINO = replace(CPU, provider="OpenVINOExecutionProvider")


async def test_a_move_to_another_runtime_shows_its_drift_and_a_wrong_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PYTHON.exists(), "make openvino"
    told = "from shoal.agent.devices.runtime import cpu_provider; print(cpu_provider())"
    asked_it = await asyncio.create_subprocess_exec(PYTHON, "-c", told, stdout=subprocess.PIPE)
    assert (await asked_it.communicate())[0].decode().strip() == OPENVINO.provider

    authority = Authority(tmp_path / "ca", "eu", SystemClock().wall())
    old, new = (
        DataPlaneNode("old", authority, tmp_path / "old"),
        DataPlaneNode("new", authority, tmp_path / "new", device=OPENVINO),
    )
    models = {"text": engine_cases.recogniser().read_bytes(), "files": engine_cases.magika().read_bytes()}
    works = {name: work(right) for name, right in models.items()}
    try:
        await asyncio.gather(old.start(), new.start())
        await new.configure()
        for name, right in models.items():
            (tmp_path / name).write_bytes(right)
            (tmp_path / f"{name}-wrong").write_bytes(engine_cases.perturb_weights(right, 0.1))
            await old.load(name, WorkloadKey("acme", name), tmp_path / name, work=works[name])
        await old.configure(witnesses=tuple(VerificationSource(name, (Verifier("m-1", "new"),)) for name in models))
        monkeypatch.setattr(sys, "executable", str(PYTHON))  # of the new node's workers
        for name in models:
            found = {}
            for what in (name, f"{name}-wrong"):
                replica = f"{what}-ov"
                terms = {"provider": OPENVINO.provider, "work": works[name]}
                await new.load(replica, WorkloadKey("acme", name), tmp_path / what, **terms)
                address = f"127.0.0.1:{old.front.config.grpc_port}"
                asked = verification(source=name, source_node="old", source_address=address, samples=16)
                asked = replace(asked, tolerances=default("fp32", "fp32"))
                found[what] = await new.front.verify(new.local_worker(replica), asked, "")
            same, wrong = found.values()
            drift = {drift.metric: drift.worst for drift in same.drifts}
            print(
                f"{name}: max_rel {drift[Metric.MAX_REL]:.2e}, cosine {drift[Metric.COSINE]:.9f}; wrong: {wrong.reason}"
            )
            assert same.passed, same.reason
            assert drift[Metric.MAX_REL] > 0, "another runtime: other roundings"
            assert (wrong.passed, wrong.code) == (False, Code.VERIFY_FAILED)
    finally:
        await asyncio.gather(old.stop(), new.stop())


async def test_the_processor_is_measured_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ProcessWorkers(
        tmp_path / "plain", tmp_path, SystemClock(), lambda _: CPU, lambda _: DeviceAccess(), NO_SPARE
    )
    other = ProcessWorkers(
        tmp_path / "other", tmp_path, SystemClock(), lambda _: OPENVINO, lambda _: DeviceAccess(), NO_SPARE
    )
    rates = {}
    try:
        rates["own"] = (await plain.probe(CPU)).rates
        monkeypatch.setattr(sys, "executable", str(PYTHON))
        receipt = await other.probe(OPENVINO)
        rates["openvino"] = receipt.rates
    finally:
        await asyncio.gather(plain.close(keep=False), other.close(keep=False))
    for name, found in rates.items():
        print(f"{name}: GFLOP/s { ({kind: round(rate / 1e9, 1) for kind, rate in found.conv_flops.items()}) }")
    assert (receipt.provider, receipt.emulated, receipt.source) == (OPENVINO.provider, False, "probe")
    assert receipt.rates.matmul_flops["fp32"] > 1e8


def work(right: bytes) -> Work:
    profile = profile_of(right, engine_cases.digest(right))
    assert isinstance(profile, ModelProfile)
    return work_of(profile)
