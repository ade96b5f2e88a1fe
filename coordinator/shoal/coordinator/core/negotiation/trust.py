"""Who may trade with whom: the Region's `trade` for what comes, a policy's `federation` for what goes."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from shoal.types.workload import Delegation, DelegationMode, Trade


def may_trade(trades: Iterable[Trade], region: str, tenant: str) -> Trade | None:
    """The first entry under which this region takes work of `region` for `tenant`; None: it takes none."""
    return next((each for each in trades if _fits((each.partner,), region) and _fits(each.tenants, tenant)), None)


def may_delegate(delegation: Delegation, region: str) -> bool:
    """May a workload that says so be run by `region`?"""
    return delegation.mode is not DelegationMode.NEVER and _fits(delegation.to, region)


def _fits(patterns: Iterable[str], name: str) -> bool:
    """Patterns are of the language's `Pattern`: names with `*` for any part."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
