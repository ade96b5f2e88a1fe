"""Who may trade with whom: the Region's `trade` for incoming work, a policy's `federation` for outgoing work."""

from collections.abc import Iterable

from shoal.types.codes import Code, Refusal
from shoal.types.workload import DelegationMode, DelegationRule, TradeRule


def may_trade(trades: Iterable[TradeRule], region: str, tenant: str) -> TradeRule | None:
    """The first entry under which this region takes work of `region` for `tenant`; None: it takes none."""
    return next(
        (each for each in trades if matches_any((each.partner,), region) and matches_any(each.tenants, tenant)), None
    )


def trade_refusal(trades: Iterable[TradeRule], region: str, tenant: str) -> Refusal | None:
    """Why this region does not take work of `region` for `tenant`, both of which need the right; None: it does."""
    trades = tuple(trades)
    if may_trade(trades, region, tenant) is not None:
        return None
    if any(matches_any((each.partner,), region) for each in trades):
        found = f"no work of {region} is taken for its tenant {tenant!r:.80}"
        return Refusal(Code.TENANT_DENIED, found, "a tenant that an entry of the Region's `trade` names")
    return Refusal(Code.TRADE_DENIED, f"no work of {region} is taken", "an entry of the Region's `trade`")


def may_delegate(delegation: DelegationRule, region: str) -> bool:
    """True if `region` may run a workload with this rule."""
    return delegation.mode is not DelegationMode.NEVER and matches_any(delegation.to, region)


def delegation_refusal(delegation: DelegationRule, region: str) -> Refusal:
    """Why `region` may not run a workload with this rule."""
    if delegation.mode is DelegationMode.NEVER:
        found, remedy = "its policy delegates never", "federation: {delegate: when-infeasible}"
    else:
        found, remedy = f"its policy delegates to {', '.join(delegation.to)}", f'federation: {{to: ["{region}"]}}'
    return Refusal(Code.TRADE_DENIED, found, f"a policy that delegates to {region}", remedy)


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Patterns are the policy language's `Pattern`: names with `*` for any part."""
    return any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    """Compiles nothing, because other regions send patterns of their own with each solicitation."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == name
    *middle, last = rest
    at, end = len(first), len(name) - len(last)
    if at > end or not name.startswith(first) or not name.endswith(last):
        return False
    for part in middle:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
