"""Typed client of a region: contexts, the operator API, inference.

Each name is imported when it is first used: whoever lists nodes needs no numpy, whoever asks for help no gRPC.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any, Final

# One refusal, one line: gRPC's core would add lines of its own for each coordinator that is gone. It reads this when
# `grpc` is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if TYPE_CHECKING:
    from shoal.client.async_inference import AsyncInferenceClient
    from shoal.client.contexts import Context, Contexts
    from shoal.client.enrolment import TOKEN_S, client_files, enrol
    from shoal.client.inference import InferenceClient
    from shoal.client.region import RegionClient, retry_while
    from shoal.client.renewal import is_due, renew_context, renew_if_due
    from shoal.client.tensors import InferenceResult, ModelMetadata, TensorSpec

__all__ = [
    "TOKEN_S",
    "AsyncInferenceClient",
    "Context",
    "Contexts",
    "InferenceClient",
    "InferenceResult",
    "ModelMetadata",
    "RegionClient",
    "TensorSpec",
    "client_files",
    "enrol",
    "is_due",
    "renew_context",
    "renew_if_due",
    "retry_while",
]

_MODULES: Final = {
    "AsyncInferenceClient": "async_inference",
    "Context": "contexts",
    "Contexts": "contexts",
    "InferenceClient": "inference",
    "InferenceResult": "tensors",
    "ModelMetadata": "tensors",
    "RegionClient": "region",
    "TOKEN_S": "enrolment",
    "TensorSpec": "tensors",
    "client_files": "enrolment",
    "enrol": "enrolment",
    "is_due": "renewal",
    "renew_context": "renewal",
    "renew_if_due": "renewal",
    "retry_while": "region",
}
"""Name -> the module that defines it."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
