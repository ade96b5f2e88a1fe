"""Typed client of a region: contexts, the operator API, inference."""

import os

# One refusal, one line: gRPC's core would add lines of its own for each coordinator that is gone. It reads this when
# `grpc` is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

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
