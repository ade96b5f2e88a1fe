import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from harness.builders.agent_values import receipt
from harness.builders.coordinator_core import device
from harness.cluster import measured_processor
from shoal.agent.core.receipt import devices_to_probe
from shoal.agent.journal.files import FileJournal
from shoal.types.receipt import SignedReceipt

CPU = device(measured_processor.DEVICE)


def journal_of(state: Path) -> tuple[SignedReceipt, ...]:
    return asyncio.run(FileJournal(state / "journal", structlog.get_logger(__name__)).load_receipts())


def test_an_agent_takes_over_what_was_measured_first_and_measures_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_processor, "_measured", [])
    emulated, first, second = (
        receipt(replace(CPU, emulated=each), at).receipt for each, at in ((True, 1.0), (False, 2.0), (False, 3.0))
    )
    measured_processor.keep([emulated, first])
    measured_processor.keep([second])
    measured_processor.hand_to("edge-7", tmp_path)
    (found,) = journal_of(tmp_path)
    assert found.receipt == replace(first, node="edge-7")
    assert devices_to_probe((found,), (CPU,)) == ()


def test_a_first_agent_is_handed_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_processor, "_measured", [])
    measured_processor.hand_to("edge-7", tmp_path)
    assert not any(tmp_path.iterdir())
