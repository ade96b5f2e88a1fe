"""Typed client of a region: contexts, the operator API, inference."""

import os

# One refusal, one line: gRPC's core would add lines of its own for each coordinator that is gone. It reads this when
# `grpc` is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from shoal.client.contexts import Context, Contexts
from shoal.client.enrolment import TOKEN_S, client_files, enrol
from shoal.client.inference import Answer, Inference
from shoal.client.region import Region, insisting
from shoal.client.renewal import freshen, is_due, renew_context

__all__ = [
    "TOKEN_S",
    "Answer",
    "Context",
    "Contexts",
    "Inference",
    "Region",
    "client_files",
    "enrol",
    "freshen",
    "insisting",
    "is_due",
    "renew_context",
]
