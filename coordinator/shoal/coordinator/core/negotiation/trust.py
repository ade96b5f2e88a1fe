"""Who may trade with whom: the Region's `trade` for what comes, a policy's `federation` for what goes."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from shoal.types.codes import Code, Refusal
from shoal.types.workload import Delegation, DelegationMode, Trade


def may_trade(trades: Iterable[Trade], region: str, tenant: str) -> Trade | None:
    """The first entry under which this region takes work of `region` for `tenant`; None: it takes none."""
    return next((each for each in trades if fits((each.partner,), region) and fits(each.tenants, tenant)), None)


def denied(trades: Iterable[Trade], region: str, tenant: str) -> Refusal | None:
    """Why this region does not work for `tenant` of `region`: each of them needs the right."""
    trades = tuple(trades)
    if may_trade(trades, region, tenant) is not None:
        return None
    if any(fits((each.partner,), region) for each in trades):
        found = f"no work of {region} is taken for its tenant {tenant!r:.80}"
        return Refusal(Code.TENANT_DENIED, found, "a tenant that an entry of the Region's `trade` names")
    return Refusal(Code.TRADE_DENIED, f"no work of {region} is taken", "an entry of the Region's `trade`")


def may_delegate(delegation: Delegation, region: str) -> bool:
    """May a workload that says so be run by `region`?"""
    return delegation.mode is not DelegationMode.NEVER and fits(delegation.to, region)


def policy_forbids(delegation: Delegation, region: str) -> Refusal:
    """Why such a workload may not be run by `region`."""
    if delegation.mode is DelegationMode.NEVER:
        found, remedy = "its policy delegates never", "federation: {delegate: when-infeasible}"
    else:
        found, remedy = f"its policy delegates to {', '.join(delegation.to)}", f'federation: {{to: ["{region}"]}}'
    return Refusal(Code.TRADE_DENIED, found, f"a policy that delegates to {region}", remedy)


def fits(patterns: Iterable[str], name: str) -> bool:
    """Patterns are of the language's `Pattern`: names with `*` for any part."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
