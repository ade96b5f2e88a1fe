"""What drivers ask of this machine: never more than they asked for, never longer than they may wait; and recordings."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.fakes.clock import ManualClock
from harness.fakes.machine import ReplayedMachine
from shoal.agent.devices.machine import (
    MAX_OUTPUT,
    MAX_TEXT,
    LiveMachine,
    Machine,
    RecordingMachine,
    number,
    scaled_number,
)
from shoal.agent.devices.nvidia import NvidiaDriver
from shoal.agent.driver_port import DriverOptions
from shoal.agent.main import main


def test_files_and_their_names(tmp_path: Path) -> None:
    machine = LiveMachine()
    for name in ("b1", "a2"):
        (tmp_path / name).write_text(name)
    assert machine.paths(f"{tmp_path}/*[0-9]") == (f"{tmp_path}/a2", f"{tmp_path}/b1")
    assert machine.text(f"{tmp_path}/a2") == "a2"
    assert (machine.text(f"{tmp_path}/none"), machine.text(str(tmp_path))) == ("", "")
    (tmp_path / "long").write_bytes(b"\xff" * 2 * MAX_TEXT)
    assert len(machine.text(f"{tmp_path}/long")) == MAX_TEXT


def test_commands() -> None:
    machine = LiveMachine()
    assert machine.run("sh", "-c", "echo $LANG; echo hidden >&2") == "C\n"
    assert machine.run("sh", "-c", "echo no; exit 3") == "", "it failed"
    assert machine.run("no-such-command-anywhere") == ""
    assert machine.run("sh", "-c", f"head -c {2 * MAX_OUTPUT} /dev/zero") == "", "too much"
    assert machine.run("sh", "-c", f"head -c {MAX_OUTPUT // 2} /dev/zero") == "\0" * (MAX_OUTPUT // 2)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("hangs", ["sleep 60", "echo begun; sleep 60", "exec >&-; sleep 60", "yes"])
def test_a_command_that_hangs_is_killed(hangs: str) -> None:
    assert LiveMachine().run("sh", "-c", f"exec {hangs}" if " " not in hangs else hangs) == ""


@pytest.mark.parametrize(
    ("text", "value"), [("7\n", 7), (" -3 ", -3), ("", None), ("7,5", None), ("٤", None), ("9" * 30, None)]
)
def test_numbers(text: str, value: int | None) -> None:
    assert number(text) == value
    assert repr(scaled_number(text, 0.5)) == repr(float("nan") if value is None else value * 0.5)


class Library:
    """As pynvml looks: handles that print as addresses, structures, errors."""

    class NVMLError(Exception):
        value = 3

    def __init__(self, real: Any) -> None:
        self._real = real
        self._handles: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real, name)

        def call(*arguments: Any) -> Any:
            try:
                answer = function(*(next((k for k, v in self._handles.items() if v is a), a) for a in arguments))
            except Exception as error:
                raise self.NVMLError from error
            if isinstance(answer, str) and answer.startswith("h"):
                return self._handles.setdefault(answer, object())
            return answer

        return call


def test_a_recording_replays_what_was_answered() -> None:
    """On a library in the place of NVML, since there is no such device here."""
    known = ReplayedMachine.of("nvidia_l4")
    live = SimpleNamespace(library=lambda name: Library(known.library(name)), text=known.text)
    recording = RecordingMachine(cast(Machine, live))
    recorded = NvidiaDriver(ManualClock(), DriverOptions(), recording)
    devices = recorded.discover()
    reading, access = recorded.read("gpu0"), recorded.access("gpu0")
    answers = json.loads(json.dumps(recording.answers))
    replayed = NvidiaDriver(ManualClock(), DriverOptions(), ReplayedMachine(answers))
    assert replayed.discover() == devices
    assert (repr(replayed.read("gpu0")), replayed.access("gpu0")) == (repr(reading), access)


def test_the_command_writes_what_it_was_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ascend.json"
    assert main(["record", "ascend", "--out", str(out)]) == 1, "there is none here"
    written = json.loads(out.read_text())
    assert (written["driver"], written["origin"]) == ("ascend", "recorded")
    assert written["answers"] == {"run npu-smi info -l": ""}
    assert main(["record", "abacus", "--out", str(out)]) == 1
    assert "NOT_FOUND" in capsys.readouterr().err
    assert main(["record", "cpu", "--out", str(out)]) == 1
    assert "FIELD_INVALID" in capsys.readouterr().err
