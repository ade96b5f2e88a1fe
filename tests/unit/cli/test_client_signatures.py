"""A program changes from one inference client to the other without changing its calls."""

from inspect import signature

import pytest

from shoal.client.async_inference import AsyncInferenceClient
from shoal.client.inference import InferenceClient


@pytest.mark.parametrize("method", ["__init__", "infer", "metadata"])
def test_both_clients_are_called_alike(method: str) -> None:
    assert signature(getattr(AsyncInferenceClient, method)) == signature(getattr(InferenceClient, method))
