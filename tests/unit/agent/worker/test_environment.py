"""What a driver says that a worker needs is there when the runtime opens the device."""

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.agent.driver_port import DeviceAccess
from shoal.agent.worker import model_loading
from shoal.agent.worker.messages import LoadOrder
from shoal.types.assignment import Work


def test_the_environment_is_set_before_the_runtime_opens_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    seen = list[str]()

    def open_engine(*_: Any, **__: Any) -> Any:
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setattr(model_loading, "open_engine", open_engine)
    monkeypatch.setattr(model_loading, "read_and_verify", lambda *_: b"")
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": "MIG-2"}):
        order = SimpleNamespace(
            access=DeviceAccess(environment),
            path="",
            digest="",
            provider="CPUExecutionProvider",
            precision="fp32",
            threads=2,
            shapes={},
            partial=None,
            prepared=None,
            work=Work(),
        )
        model_loading.open_model(cast(LoadOrder, order))
    assert seen == ["7", "MIG-2"], "of devices that need nothing, nothing is changed"
