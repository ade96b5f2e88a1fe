"""Typed client of a region: contexts, the operator API, inference."""

from shoal.client.contexts import Context, Contexts
from shoal.client.inference import Answer, Inference
from shoal.client.region import Region
from shoal.client.renewal import freshen, renew_context

__all__ = ["Answer", "Context", "Contexts", "Inference", "Region", "freshen", "renew_context"]
