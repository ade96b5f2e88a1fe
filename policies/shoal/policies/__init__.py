"""Shoal's policy language: YAML documents to typed, checked intents."""

from shoal.policies.documents import (
    DEFAULT_TENANT,
    Document,
    LoadedDocuments,
    bounded_problems,
    canonical,
    canonical_text,
    cross_check,
    load,
    name_of,
    nearest_name,
    read,
    reference_problems,
    some_names,
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
    "bounded_problems",
    "canonical",
    "canonical_text",
    "cross_check",
    "load",
    "name_of",
    "nearest_name",
    "node_price",
    "quota",
    "read",
    "reference_problems",
    "resolve",
    "some_names",
    "trades",
]
