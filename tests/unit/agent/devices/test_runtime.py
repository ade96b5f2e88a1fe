"""Which ONNX Runtime a device's receipt names."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from shoal.agent.devices.runtime import runtime_version


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.setattr(sys, "path", [str(folder)])


def test_the_runtime_is_the_one_that_is_installed() -> None:
    assert runtime_version() == f"onnxruntime {metadata.version('onnxruntime')}"


def test_of_two_distributions_it_is_the_one_that_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where onnxruntime-gpu was installed over onnxruntime."""
    told = "package_name = 'onnxruntime-gpu'\n__version__ = '1.31.1'\ncuda_version = '13.0'\n"
    files = {
        "onnxruntime/__init__.py": '__version__ = "1.31.0"\n',
        "onnxruntime/capi/build_and_package_info.py": told,
        "onnxruntime-1.30.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: onnxruntime\nVersion: 1.30.0\n",
        "onnxruntime_gpu-1.31.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.31.1\n",
    }
    install(tmp_path, monkeypatch, files)
    assert metadata.version("onnxruntime") == "1.30.0"
    assert runtime_version() == "onnxruntime 1.31.1"


def test_a_build_without_a_word_on_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, {"onnxruntime/__init__.py": '"""A runtime."""\n__version__ = "1.31.0"\n'})
    assert runtime_version() == "onnxruntime 1.31.0"


@pytest.mark.parametrize("files", [{}, {"onnxruntime/capi/left.py": ""}, {"onnxruntime/__init__.py": "no = 1\n"}])
def test_none_or_what_an_uninstallation_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    install(tmp_path, monkeypatch, files)
    assert runtime_version() == ""
