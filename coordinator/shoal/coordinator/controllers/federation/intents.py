"""The region's own workloads by key, for the origin's side of delegations."""

from collections.abc import Mapping

from shoal.coordinator.controllers.federation.local_region import LocalRegion
from shoal.coordinator.core.negotiation.offer_selection import request_hash
from shoal.types.units import Seconds
from shoal.types.workload import Intent, WorkloadKey


class IntentIndex:
    """Kept until the documents change: there may be many workloads, and every tick reads them."""

    def __init__(self, local_region: LocalRegion) -> None:
        self._local_region = local_region
        self._indexed: tuple[tuple[Intent, ...], dict[WorkloadKey, Intent]] = ((), {})
        self._request_hashes: dict[WorkloadKey, tuple[Intent, str]] = {}

    def by_key(self) -> Mapping[WorkloadKey, Intent]:
        intents = self._local_region.intents()
        if self._indexed[0] is not intents:
            self._indexed = (intents, {intent.key: intent for intent in intents})
            self._request_hashes = {
                key: known for key, known in self._request_hashes.items() if key in self._indexed[1]
            }
        return self._indexed[1]

    def get(self, key: WorkloadKey) -> Intent | None:
        return self.by_key().get(key)

    def term_s(self, key: WorkloadKey) -> Seconds:
        """The term to ask for; 0 where there is no such workload."""
        intent = self.get(key)
        return intent.delegation.term_s if intent is not None else Seconds(0.0)

    def request_hash(self, intent: Intent) -> str:
        """Hash of what another region would be asked for."""
        known = self._request_hashes.get(intent.key)
        if known is None or known[0] is not intent:
            known = self._request_hashes[intent.key] = (intent, request_hash(intent))
        return known[1]
