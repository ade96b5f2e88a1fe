"""F33, A36: what is loaded is what was checked, byte for byte."""

from pathlib import Path

import numpy as np
import pytest

from harness.models import engine_cases as models
from harness.report import record
from shoal.agent.worker.engine import open_engine, read_and_verify, run_options
from shoal.agent.worker.providers import Provider
from shoal.types.codes import Code, ShoalError


def test_f33_a_hundred_corruptions_are_found(tmp_path: Path) -> None:
    data = models.recogniser().read_bytes()
    digest = models.digest(data)
    path = tmp_path / "model"
    generator = np.random.default_rng(33)
    found = 0
    for number in range(100):
        at = int(generator.integers(len(data)))
        changed = {
            0: data[:at],
            1: data[:at] + bytes([data[at] ^ (1 << int(generator.integers(8)))]) + data[at + 1 :],
            2: data + b"\x00" * int(generator.integers(1, 4096)),
            3: data[:at] + data[at + 1 :],
        }[number % 4]
        path.write_bytes(changed)
        with pytest.raises(ShoalError) as refused:
            read_and_verify(str(path), digest)
        found += refused.value.code is Code.MODEL_DIGEST
    assert found == 100
    path.write_bytes(data)
    assert read_and_verify(str(path), digest) == data
    record("F33", "I", 100, found=found)


def test_a36_changed_after_the_check(tmp_path: Path) -> None:
    """The bytes that were hashed go to the runtime, not the path."""
    path = tmp_path / "model"
    path.write_bytes(models.add_one())
    checked = read_and_verify(str(path), models.digest(models.add_one()))
    path.write_bytes(models.divide())
    engine = open_engine(checked, Provider("CPUExecutionProvider"))
    outputs = engine.run({"x": np.ones(2, np.float32)}, ["y"], run_options())
    assert outputs["y"].tolist() == [2.0, 2.0]


def test_a36_links_and_absent_files(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(models.add_one())
    link = tmp_path / "link"
    link.symlink_to(path)
    for wrong in (link, tmp_path / "absent", tmp_path):
        with pytest.raises(ShoalError) as refused:
            read_and_verify(str(wrong), models.digest(models.add_one()))
        assert refused.value.code is Code.LOAD_FAILED


def test_a_provider_that_is_not_installed() -> None:
    with pytest.raises(ShoalError) as refused:
        open_engine(models.add_one(), Provider("NoSuchExecutionProvider"))
    assert refused.value.code is Code.LOAD_FAILED
    assert "CPUExecutionProvider" in refused.value.refusal.found
