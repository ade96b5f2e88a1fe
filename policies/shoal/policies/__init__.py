"""Shoal's policy language: YAML documents to typed, checked intents."""

from shoal.policies.documents import (
    DEFAULT_TENANT,
    Document,
    LoadedDocuments,
    canonical,
    canonical_text,
    cross_check,
    load,
    name_of,
    read,
    reference_problems,
)
from shoal.policies.kinds import Kind, Policy, Region, Tenant, Workload
from shoal.policies.parse import MAX_BYTES, Problem
from shoal.policies.resolve import node_price, quota, resolve, trades

__all__ = [
    "DEFAULT_TENANT",
    "MAX_BYTES",
    "Document",
    "Kind",
    "LoadedDocuments",
    "Policy",
    "Problem",
    "Region",
    "Tenant",
    "Workload",
    "canonical",
    "canonical_text",
    "cross_check",
    "load",
    "name_of",
    "node_price",
    "quota",
    "read",
    "reference_problems",
    "resolve",
    "trades",
]
