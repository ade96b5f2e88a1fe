"""Labels of a node: which ones count for selectors, prices and entry points, and which ones are only self-declared.

A label counts when the join token or an operator granted it, or when the token allows the node to declare it. Every
other label that a node declares is kept under `self.`, so that a policy that selects by it has to say so.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Final

from shoal.policies.resolve import PRICE_LABEL, RTT_LABEL
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import COST, DURATION, parse_quantity

SELF_PREFIX: Final = "self."
"""Prefix of a label that only the node itself declares."""
ENTRY_LABEL: Final = "entry"
"""Lists the tenants whose clients may call this node: names separated by commas, or `*`. A gateway without it is for
all."""
EVERY_TENANT: Final = "*"
MAX_LABELS: Final = 64
"""Labels of one node, the same as for one document (`metadata.labels`)."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_PATTERN: Final = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9._/*?-]{0,62}")
MAX_VALUE_LENGTH: Final = 256
"""Characters of a label's value."""
_QUANTITIES: Final = {PRICE_LABEL: COST, RTT_LABEL: DURATION}
"""Labels whose value counts as a quantity, and its dimension."""


@dataclass(frozen=True, slots=True)
class LabelGrant:
    """What the region grants to one node."""

    # Labels that count, whatever the node declares.
    labels: Mapping[str, str] = field(default_factory=dict)
    # Patterns of label names that count where the node declares them.
    allowed: tuple[str, ...] = ()

    def with_labels(self, given: Mapping[str, str], removed: Iterable[str] = ()) -> "LabelGrant":
        kept = {name: value for name, value in self.labels.items() if name not in set(removed)}
        return replace(self, labels={**kept, **given})


NO_LABEL_GRANT: Final = LabelGrant()


def effective_labels(declared: Mapping[str, str], grant: LabelGrant) -> Mapping[str, str]:
    """The labels of a node that declares these: granted ones, allowed ones, and the rest under `self.`."""
    found = dict[str, str]()
    for name, value in declared.items():
        if name not in grant.labels and _is_allowed(name, grant.allowed):
            found[name] = value
        elif grant.labels.get(name) != value:
            found[SELF_PREFIX + name] = value
    return {**found, **grant.labels}


def entry_tenants(labels: Mapping[str, str]) -> frozenset[str]:
    """The tenants whose clients may call a node with these labels; `*` stands for all."""
    return frozenset(name for each in labels.get(ENTRY_LABEL, "").split(",") if (name := each.strip()))


def check_label_count(count: int) -> Refusal | None:
    """Why a node must not be granted so many labels, or patterns; None where it may be."""
    if count <= MAX_LABELS:
        return None
    return Refusal(Code.FIELD_INVALID, f"{count} labels", f"at most {MAX_LABELS}", "give fewer")


def check_labels(labels: Mapping[str, str], allowed: Iterable[str] = ()) -> Refusal | None:
    """Why these labels or patterns must not be granted; None where they may be. Its code is FIELD_INVALID, or of a
    quantity: QUANTITY_INVALID, UNIT_MISSING or UNIT_WRONG."""
    patterns = tuple(allowed)
    if (refusal := check_label_count(max(len(labels), len(patterns)))) is not None:
        return refusal
    for name, value in labels.items():
        if name.startswith(SELF_PREFIX) or _NAME.fullmatch(name) is None:
            return Refusal(
                Code.FIELD_INVALID,
                f"label {name!r:.80}",
                f"a name of letters, digits and ._/-, up to 63, that does not begin with {SELF_PREFIX}",
                "choose another name",
            )
        if len(value) > MAX_VALUE_LENGTH or not value.isprintable():
            return Refusal(
                Code.FIELD_INVALID,
                f"label {name} with a value of {len(value)} characters",
                f"up to {MAX_VALUE_LENGTH} printable characters",
                "choose another value",
            )
        if name in _QUANTITIES:
            # Without a number that counts, each bound of cost or latency would exclude the node, and nobody told why.
            try:
                parse_quantity(value, _QUANTITIES[name])
            except ShoalError as error:
                return replace(error.refusal, found=f"label {name}: {error.refusal.found}")
    for pattern in patterns:
        if _PATTERN.fullmatch(pattern) is None:
            return Refusal(
                Code.FIELD_INVALID, f"pattern {pattern!r:.80}", "a label's name, with * and ?", "for example: site"
            )
    return None


def check_declared_labels(declared: Mapping[str, str]) -> Refusal | None:
    """Why the labels that a node declares are refused; None where they are accepted. They are bounded because the
    coordinator stores them and evaluates selectors over them."""
    longest = max((max(len(name), len(value)) for name, value in declared.items()), default=0)
    if len(declared) <= MAX_LABELS and longest <= MAX_VALUE_LENGTH:
        return None
    return Refusal(
        Code.MESSAGE_INVALID,
        f"{len(declared)} labels, the longest of {longest} characters",
        f"at most {MAX_LABELS} of {MAX_VALUE_LENGTH} characters",
        "start the agent with fewer labels",
    )


def _is_allowed(name: str, patterns: Iterable[str]) -> bool:
    return not name.startswith(SELF_PREFIX) and any(fnmatchcase(name, pattern) for pattern in patterns)
