"""Typed client of a region: contexts, the operator API, inference."""

from shoal.client.contexts import Context, Contexts
from shoal.client.inference import Answer, Inference
from shoal.client.region import Region

__all__ = ["Answer", "Context", "Contexts", "Inference", "Region"]
