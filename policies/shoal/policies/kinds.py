"""The four kinds, typed: what a document may say. What this release acts on is said by `check`, not here."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from shoal.policies.quantities import (
    Duration,
    Line,
    Name,
)

API_VERSION = "shoal/v1"


class Part(BaseModel):
    """A mapping of a document: every field known, no value bent to fit, nothing changed after."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, serialize_by_alias=True)


def _mapping_or(word: str) -> Discriminator:
    """Tells a field's short form (a word or quantity, tagged `word`) from its mapping form."""

    def form(value: Any) -> str:
        return "<mapping>" if isinstance(value, dict | BaseModel) else word

    return Discriminator(form)


def _word_or(word: str) -> Discriminator:
    """Tells the one `word` from a quantity."""

    def form(value: Any) -> str:
        return "<word>" if value == word else "<quantity>"

    return Discriminator(form)


class Latency(Part):
    p95: Duration
    measured: Literal["origin", "device"] = Field("origin", alias="from")


class Bound(Part):
    """One tolerated difference between two outputs of a model."""

    metric: Literal["max_abs", "max_rel", "cosine", "top_k"]
    at_least: float | None = None
    at_most: float | None = None


class OutputBounds(Part):
    outputs: dict[Line, Bound]


class Precision(Part):
    allow: tuple[PrecisionName, ...] = ()
    tolerance: (
        Annotated[
            Annotated[OutputBounds, Tag("<outputs>")] | Annotated[Bound, Tag("<bound>")],
            Discriminator(lambda value: "<outputs>" if _has(value, "outputs") else "<bound>"),
        ]
        | None
    ) = None


class Availability(Part):
    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    spread: Literal["none", "device", "node"] = "none"
    standby: Literal["none", "warm", "staged"] = "none"
    recovery: Duration | None = None


class SignedModel(Part):
    keys: tuple[Name, ...]


class Trust(Part):
    capability: Literal["measured"] = "measured"
    within: Duration | None = None
    signed_model: SignedModel | None = None
