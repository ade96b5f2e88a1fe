"""What the federation accepts from a region: members that can be reached and identified, and advertisements that can be
true."""

import math
import re
from typing import Final

from shoal.coordinator.core.signals.model import MAX_VALUES, SignalName
from shoal.types.address import is_dialable
from shoal.types.codes import Code, Refusal
from shoal.types.identity import NAME_PATTERN, NAME_RULE
from shoal.types.offer import Advertisement, CapacityClass, Member, Solicitation

CLASSES_MOST: Final = 64
REGIONS_MOST: Final = 1000
DEVICES_MOST: Final = 1_000_000
"""Devices of one class. No real region has more."""
DEVICE_BYTES_MOST: Final = 2**44
COST_MOST: Final = MAX_VALUES[SignalName.PRICE]
"""USD/h of one device."""
JOULES_MOST: Final = 1e6
CARBON_MOST: Final = MAX_VALUES[SignalName.CARBON]
RTT_MOST: Final = 60.0
ADVERTISEMENT_LEASE_LEAST_S: Final = 1.0
ADVERTISEMENT_LEASE_MOST_S: Final = 300.0
ROOTS_MOST: Final = 4
"""CAs of one region, or of the federation: two during a rotation."""
ROOT_BYTES_MOST: Final = 4096
"""Of one CA's certificate in PEM. Those that a region or a federation makes have about 700."""
MODELS_MOST: Final = 64
ANSWER_MOST_S: Final = 10.0
SOLICITATION_BYTES: Final = 256 * 2**10
"""Of a signed solicitation. Delegates refuse a longer one, too."""
PATTERNS_MOST: Final = 64
"""Names and patterns of regions in one solicitation, as many as a policy may list (`federation.to`)."""

_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:@()+/-]{0,79}")
_REGION_PATTERN: Final = re.compile(r"[a-z0-9*-]{1,63}")
"""Every name, and every pattern of names that a policy may have."""
_DIGEST: Final = re.compile(r"(?:[0-9a-f]{64})?")


def check_advertisement(advertisement: Advertisement, before: Advertisement | None) -> Refusal | None:
    """ADVERT_INVALID or REPLAYED where the advertisement does not count; else None. before: the newest valid one of
    that region."""
    if (found := _advertisement_problem(advertisement)) is not None:
        return Refusal(Code.ADVERT_INVALID, found, "what a region can have", "the last good one counts until it is old")
    if before is None or advertisement.sequence > before.sequence:
        return None
    if repr(advertisement) != repr(before):  # repr, because NaN does not equal itself
        return Refusal(
            Code.REPLAYED,
            f"advertisement {advertisement.sequence}",
            f"one after {before.sequence}",
            "nothing, if it came late; else set the clock of that region",
        )
    return None


def check_member(member: Member) -> Refusal | None:
    """Checks what a region says about itself. Whether its CA certificates can be parsed is checked by the module that
    reads certificates."""
    if not is_dialable(member.address):
        return _invalid(f"address {member.address!r:.80}", "HOST:PORT at which others reach its coordinator")
    if not 0 < len(member.roots) <= ROOTS_MOST:
        return _invalid(f"{len(member.roots)} CAs", f"1 to {ROOTS_MOST}")
    if (largest := max(map(len, member.roots))) > ROOT_BYTES_MOST:
        return _invalid(f"a CA of {largest} bytes", f"at most {ROOT_BYTES_MOST}")
    if not _is_residency(member.residency):
        return _invalid(f"residency {member.residency!r:.80}", NAME_RULE)
    return None


def check_solicitation(solicitation: Solicitation) -> Refusal | None:
    remedy = "update the coordinator that asks"
    if not 0 < len(solicitation.models) <= MODELS_MOST:
        return Refusal(Code.MESSAGE_INVALID, f"{len(solicitation.models)} models", f"1 to {MODELS_MOST}", remedy)
    if not 0 < solicitation.answer_s <= ANSWER_MOST_S:
        found = f"answers within {solicitation.answer_s:g}s"
        return Refusal(Code.MESSAGE_INVALID, found, f"up to {ANSWER_MOST_S:g}s", remedy)
    if len(solicitation.to) > PATTERNS_MOST:
        found = f"{len(solicitation.to)} patterns of regions"
        return Refusal(Code.MESSAGE_INVALID, found, f"at most {PATTERNS_MOST}", remedy)
    unknown = next((each for each in solicitation.to if _REGION_PATTERN.fullmatch(each) is None), None)
    if unknown is not None:
        found = f"a pattern {unknown!r:.80}"
        return Refusal(Code.MESSAGE_INVALID, found, "names of regions, with * for any part", remedy)
    return None


def _advertisement_problem(advertisement: Advertisement) -> str | None:
    if len(advertisement.classes) > CLASSES_MOST:
        return f"{len(advertisement.classes)} classes, at most {CLASSES_MOST}"
    if not ADVERTISEMENT_LEASE_LEAST_S <= advertisement.lease_s <= ADVERTISEMENT_LEASE_MOST_S:
        return f"a lease of {advertisement.lease_s:g}s"
    if max(len(advertisement.rtt_s), len(advertisement.heads)) > REGIONS_MOST:
        return f"more than {REGIONS_MOST} other regions"
    if not all(NAME_PATTERN.fullmatch(name) for name in (*advertisement.rtt_s, *advertisement.heads)):
        return "names of regions that are none"
    if not all(0 <= rtt <= RTT_MOST for rtt in advertisement.rtt_s.values()):
        return "round trips that are none"
    if not all(_DIGEST.fullmatch(head) for head in (advertisement.ledger_head, *advertisement.heads.values())):
        return "heads of ledgers that are no digests"
    if len(advertisement.trusted_roots) > ROOTS_MOST:
        return f"{len(advertisement.trusted_roots)} CAs of the federation, at most {ROOTS_MOST}"
    if not all(root and _DIGEST.fullmatch(root) for root in advertisement.trusted_roots):
        return "CAs of the federation that are no digests"
    if not _is_residency(advertisement.residency):
        return f"residency {advertisement.residency!r:.80}"
    kinds = [(each.device_class, each.runtime) for each in advertisement.classes]
    if len(set(kinds)) < len(kinds):
        return "a class that is there twice"
    return next((found for each in advertisement.classes if (found := _class_problem(each)) is not None), None)


def _is_residency(text: str) -> bool:
    """True for a name, and for the empty text of a region that states none."""
    return not text or NAME_PATTERN.fullmatch(text) is not None


def _class_problem(each: CapacityClass) -> str | None:
    """NaN lies in no range; it means `unknown` where that is allowed."""
    name = f"class {each.device_class!r:.40}"
    if not all(_WORD.fullmatch(word) for word in (each.device_class, each.runtime, *each.precisions)):
        return f"{name}: words that are none"
    if len(each.precisions) > 16:
        return f"{name}: {len(each.precisions)} precisions"
    if not 0 < each.devices <= DEVICES_MOST:
        return f"{name}: {each.devices} devices"
    if not 0 <= each.free_bytes <= each.devices * DEVICE_BYTES_MOST:
        return f"{name}: {each.free_bytes} bytes free"
    if not (math.isnan(each.cost_usd_per_h) or 0 <= each.cost_usd_per_h <= COST_MOST):
        return f"{name}: {each.cost_usd_per_h:g} USD/h"
    if not (math.isnan(each.joules_per_tflop) or 0 < each.joules_per_tflop <= JOULES_MOST):
        return f"{name}: {each.joules_per_tflop:g} J per TFLOP"
    if not (math.isnan(each.carbon_g_per_kwh) or 0 <= each.carbon_g_per_kwh <= CARBON_MOST):
        return f"{name}: {each.carbon_g_per_kwh:g} gCO2/kWh"
    if not 0 <= each.confidence <= 1:
        return f"{name}: confidence {each.confidence:g}"
    return None


def _invalid(found: str, asked: str) -> Refusal:
    return Refusal(Code.FIELD_INVALID, found, asked, "correct it at that region")
