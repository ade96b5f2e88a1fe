"""Which drivers are started on a machine."""

from pathlib import Path

import pytest

from shoal.agent.devices import installed
from shoal.agent.devices.installed import SIGNS, installed_drivers, present_drivers
from shoal.agent.driver_port import DriverOptions

NONE = DriverOptions()


@pytest.fixture(autouse=True)
def _no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "installed_packages", lambda: ())


def names(root: Path, options: DriverOptions = NONE, *, cpu: bool = True) -> set[str]:
    return set(present_drivers(options, cpu=cpu, root=root))


def test_a_plain_machine_starts_the_processors_alone(tmp_path: Path) -> None:
    assert names(tmp_path) == {"cpu"}
    assert names(tmp_path, cpu=False) == set()
    assert set(installed_drivers()) >= {"cpu", "emulated", "plugins", *SIGNS}, "all of them are there"


@pytest.mark.parametrize(("driver", "sign"), [(name, sign) for name, signs in SIGNS.items() for sign in signs])
def test_a_vendor_s_driver_starts_ours(tmp_path: Path, driver: str, sign: str) -> None:
    path = tmp_path / sign.lstrip("/")
    path.parent.mkdir(parents=True)
    path.touch()
    assert names(tmp_path) == {"cpu", driver}


def test_options_start_what_they_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(tmp_path, DriverOptions(emulate=("abacus",))) == {"cpu", "emulated"}, "which refuses it"
    assert names(tmp_path, DriverOptions(simulate=("htp",))) == {"cpu", "plugins"}
    monkeypatch.setattr(installed, "installed_packages", lambda: ("onnxruntime_qnn",))
    assert names(tmp_path) == {"cpu", "plugins"}


def test_of_another_s_driver_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"cpu": "a:A", "own": "b:B", "nvidia": "c:C"}
    monkeypatch.setattr(installed, "installed_drivers", lambda *, cpu: known)
    assert present_drivers(NONE, cpu=True, root=tmp_path) == {"cpu": "a:A", "own": "b:B"}
