"""Which device a worker's runtime sees."""

import os

import pytest

from shoal.agent.worker.engine import restrict_visible_device


def test_a_worker_sees_the_one_nvidia_device_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    restrict_visible_device("")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7", "of devices of other kinds nothing is known"
    restrict_visible_device("MIG-22222222-3333-4444-5555-666666666666")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-22222222-3333-4444-5555-666666666666"
