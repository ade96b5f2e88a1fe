"""Applied documents and pushed models as values, and what placement reads of them.

A document is parsed once: its value, its digest and what it resolves to are kept with it. A catalog is an immutable
value, so what is kept never outlives the text that it was computed from.
"""

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

from immutables import Map

from shoal.coordinator.core.catalog.checks import no_reference
from shoal.coordinator.core.catalog.lazy import lazy_property
from shoal.coordinator.core.catalog.publishers import (
    NewestVersion,
    SignatureCheck,
    VerifyBundle,
    check_signature,
    publisher_keys,
    signatures,
)
from shoal.coordinator.core.placement.model import RegionFacts, Signatures, number_of
from shoal.coordinator.core.signals.model import Signal, SignalName, SignalRule
from shoal.coordinator.core.workloads.model import Reference, References
from shoal.policies import (
    DEFAULT_TENANT,
    Document,
    Kind,
    Policy,
    Region,
    Tenant,
    Workload,
    quota,
    read,
    resolve,
    trades,
)
from shoal.policies.check import check_with_policy
from shoal.policies.kinds import CarbonFeed, PriceFeed
from shoal.types.migration import PackRef
from shoal.types.profile import ModelProfile
from shoal.types.units import Seconds, Wall
from shoal.types.workload import Intent, ModelRef, Quota, TradeRule, WorkloadKey, variant_of

DOCUMENTS: Final = "documents/"
MODELS: Final = "models/"
PACKS: Final = "packs/"


class DocumentKey(NamedTuple):
    """kind: as in the document (`Workload`). name: `tenant/name` of a workload, else the document's name."""

    kind: str
    name: str

    @property
    def store_key(self) -> str:
        return f"{DOCUMENTS}{self.kind.lower()}/{self.name}"


@dataclass(frozen=True)
class StoredDocument:
    """An applied document as stored."""

    # Kind of the document, such as `Workload`.
    kind: str
    # `tenant/name` of a workload, else the document's name.
    name: str
    # Canonical JSON, one line.
    text: str
    # Counts the changes of this document, from 1.
    revision: int
    # When this revision was applied.
    applied_at: Wall
    # URI name of the actor who applied it.
    applied_by: str
    # Digest of each model source and of the samples of a workload, as resolved when it was applied.
    pinned: Mapping[str, str] = field(default_factory=dict)
    # True if a rollback brought this revision back.
    back: bool = False

    @lazy_property
    def key(self) -> DocumentKey:
        return DocumentKey(self.kind, self.name)

    @lazy_property
    def value(self) -> Kind:
        """Raises ShoalError if this version does not accept the text."""
        return read(json.loads(self.text))

    @property
    def document(self) -> Document:
        """The value with its positions, for the checks between documents."""
        return Document(f"stored {self.kind} {self.name}", self.value, self.text)

    @lazy_property
    def number(self) -> int:
        """Its part of the hash of a plan."""
        return number_of(self.kind, self.name, self.digest)

    @lazy_property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.text}\n{json.dumps(dict(self.pinned), sort_keys=True)}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One pushed model as stored."""

    # Digest of the file; its key in the blob store.
    digest: str
    # Names that it was pushed under. A later push of another model takes over the name.
    names: tuple[str, ...]
    # When it was first pushed.
    pushed_at: Wall
    # Actor of the first push.
    pushed_by: str
    # What inspection found in the model.
    profile: ModelProfile
    # Publishers' signature bundles over it, as pushed, one for each key.
    signatures: tuple[bytes, ...] = ()
    # The region that lent it for a guest workload; no document of this region may name it. Empty: pushed here.
    guest_of: str = ""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which replica recorded a reference's answers, and when."""

    # Digest of the model.
    model: str
    # Digest of the pack with the inputs; empty: the inputs were generated.
    samples: str
    # The workload that the replica serves.
    workload: WorkloadKey
    # Id of the replica's assignment.
    assignment: str
    # Node that ran it.
    node: str
    # Device of the node.
    device: str
    # Execution provider of the runtime.
    provider: str
    # Version of the runtime; empty where the node is not known.
    runtime_version: str
    # Precision that the model ran at.
    precision: str
    # When the recording was made.
    at: Wall
    # True: the node prepared the model in this precision.
    prepared: bool = False

    @property
    def variant(self) -> str:
        """As `workload.variant_of`."""
        return variant_of(self.model, self.precision if self.prepared else "")

    def __str__(self) -> str:
        runs = " ".join(filter(None, (self.provider, self.runtime_version, self.precision)))
        return f"{self.node}/{self.device} ({runs})"


@dataclass(frozen=True, slots=True)
class PackRecord:
    """One pack of samples, pushed by people or recorded by a replica."""

    # Digest of the pack's file.
    digest: str
    # When it was first pushed or recorded.
    pushed_at: Wall
    # Actor of the first push.
    pushed_by: str
    # What inspection found, by digest of each model that the pack was inspected for.
    read_for: Mapping[str, PackRef]
    # For models that this pack is the reference of: which replica recorded the answers.
    recorded: tuple[Provenance, ...] = ()


@dataclass(frozen=True, slots=True)
class Guest:
    """A workload that this region runs for another region under an agreement."""

    # The origin region.
    region: str
    # The workload as placement sees it, under the guest tenant.
    intent: Intent
    # RTT between the two regions.
    rtt_s: Seconds


@dataclass(frozen=True, slots=True)
class ResolvedWorkload:
    """A workload under its policy, with the stored values that this was computed from."""

    # The workload's document, its policy's, then its models, samples and warm-up samples; None for what is missing.
    sources: Sequence[object]
    # The workload as placement sees it.
    intent: Intent
    # True if a check of the workload with its policy finds something.
    has_problems: bool
    # True if there is no policy of the name that it asks for.
    lacks_policy: bool


@dataclass(frozen=True, slots=True)
class ResolvedDocuments:
    """What a catalog's documents amount to."""

    # Each under its policy.
    workloads: Map[DocumentKey, ResolvedWorkload]
    # The workloads by name.
    order: tuple[DocumentKey, ...]
    # Of the workloads, in that order.
    intents: tuple[Intent, ...]
    # By name.
    policies: dict[str, Policy]
    # By tenant.
    quotas: Mapping[str, Quota]
    # Workloads of which a check with their policy or tenant found something, or would have.
    doubtful: frozenset[DocumentKey]
    # Sum of `StoredDocument.number`.
    number: int


@dataclass(frozen=True, slots=True)
class EarlierCatalog:
    """What an earlier catalog resolved."""

    # As in Catalog.
    documents: Mapping[DocumentKey, StoredDocument]
    # As in Catalog.
    models: Mapping[str, ModelRecord]
    # As in Catalog.
    packs: Mapping[str, PackRecord]
    # What its documents amounted to.
    resolution: ResolvedDocuments
    # Keys of documents that changed, came or went since; None: not known.
    changed: frozenset[DocumentKey] | None


@dataclass(frozen=True)
class Catalog:
    """Everything that people applied or pushed to the region, and the guests of other regions."""

    # Applied documents.
    documents: Mapping[DocumentKey, StoredDocument] = field(default_factory=dict)
    # By digest.
    models: Mapping[str, ModelRecord] = field(default_factory=dict)
    # The newest signed version seen, by line (`NewestVersion.line`).
    newest: Mapping[str, NewestVersion] = field(default_factory=dict)
    # Workloads run for other regions; no document describes them.
    guests: tuple[Guest, ...] = ()
    # By digest.
    packs: Mapping[str, PackRecord] = field(default_factory=dict)
    # What the catalog before this one resolved. It saves work, and changes no result.
    earlier: EarlierCatalog | None = field(default=None, compare=False, repr=False)

    def with_changes(self, **changes: Any) -> Self:
        """The catalog with other values of some fields. Workloads that they do not concern stay resolved."""
        return replace(self, earlier=self._earlier(None if "documents" in changes else frozenset()), **changes)

    def with_documents(self, changed: Mapping[DocumentKey, StoredDocument], gone: Collection[DocumentKey] = ()) -> Self:
        """The catalog with other documents. It costs what changed, but where a policy or model did."""
        known = self.documents
        documents = (known if isinstance(known, Map) else Map[DocumentKey, StoredDocument](known)).mutate()
        documents.update(changed)
        for key in gone:
            del documents[key]
        return replace(self, documents=documents.finish(), earlier=self._earlier(frozenset((*changed, *gone))))

    def _earlier(self, changed: frozenset[DocumentKey] | None) -> EarlierCatalog | None:
        """What is resolved already. changed: documents, from this catalog to the next."""
        if (resolution := vars(self).get("resolution")) is not None:
            return EarlierCatalog(self.documents, self.models, self.packs, resolution, changed)
        if self.earlier is None or self.earlier.changed is None or changed is None:
            return None if self.earlier is None else replace(self.earlier, changed=None)
        return replace(self.earlier, changed=self.earlier.changed | changed)

    def digest_of(self, source: str) -> str | None:
        """The digest of a model pushed here, by digest or name; None if there is none."""
        if source in self.models and not self.models[source].guest_of:
            return source
        return self._digests_by_name.get(source)

    @lazy_property
    def _digests_by_name(self) -> Mapping[str, str]:
        found = dict[str, str]()
        for digest, model in self.models.items():
            for name in model.names:
                found.setdefault(name, digest)
        return found

    def of_kind(self, kind: type[Kind]) -> Iterator[tuple[StoredDocument, Any]]:
        """Documents of a kind with their values, in the order of names."""
        for stored in self._ordered:
            if isinstance(value := stored.value, kind):
                yield stored, value

    @lazy_property
    def _ordered(self) -> tuple[StoredDocument, ...]:
        return tuple(self.documents[key] for key in sorted(self.documents))

    @property
    def policies(self) -> dict[str, Policy]:
        """By name."""
        return self.resolution.policies

    def policy(self, name: str | None) -> Policy | None:
        stored = self.documents.get(DocumentKey("Policy", name or ""))
        return stored.value if stored is not None and isinstance(stored.value, Policy) else None

    @lazy_property
    def intents(self) -> tuple[Intent, ...]:
        """Own workloads in order of names, then guests. Raises ShoalError(MODEL_UNKNOWN) only if a pinned model is
        missing, which `remove` prevents.
        """
        guests = tuple(guest.intent for guest in self.guests)
        return (*self.resolution.intents, *guests) if guests else self.resolution.intents

    @property
    def workloads(self) -> Mapping[DocumentKey, ResolvedWorkload]:
        return self.resolution.workloads

    @lazy_property
    def resolution(self) -> ResolvedDocuments:
        """A workload is resolved again only if one of its sources is another object than before."""
        before = self.earlier
        if before is None or before.changed is None or before.models is not self.models:
            return self._resolve_all()
        is_small = all(key.kind not in ("Policy", "Tenant") for key in before.changed)
        return (
            self._resolve_some(before, before.changed)
            if is_small and before.packs is self.packs
            else self._resolve_all()
        )

    def _resolve_all(self) -> ResolvedDocuments:
        earlier = (
            self.earlier.resolution.workloads if self.earlier is not None else Map[DocumentKey, ResolvedWorkload]()
        )
        found = {stored.key: self._resolved(stored, value, earlier) for stored, value in self.of_kind(Workload)}
        policies = {policy.metadata.name: policy for _, policy in self.of_kind(Policy)}
        quotas = {tenant.metadata.name: quota(tenant) for _, tenant in self.of_kind(Tenant)}
        return ResolvedDocuments(
            Map(found),
            tuple(found),
            tuple(each.intent for each in found.values()),
            policies,
            quotas,
            frozenset(key for key, each in found.items() if _is_doubtful(each, quotas)),
            sum(stored.number for stored in self.documents.values()),
        )

    def _resolve_some(self, before: EarlierCatalog, changed: Collection[DocumentKey]) -> ResolvedDocuments:
        """Where only workloads and regions changed."""
        known, number = before.resolution, before.resolution.number
        workloads, order, intents = known.workloads.mutate(), [*known.order], [*known.intents]
        doubtful = {*known.doubtful}
        for key in changed:
            old, new = before.documents.get(key), self.documents.get(key)
            number += (new.number if new is not None else 0) - (old.number if old is not None else 0)
            if key.kind != "Workload":
                continue
            at = bisect_left(order, key)
            is_known = at < len(order) and order[at] == key
            doubtful.discard(key)
            if new is None:
                del order[at : at + is_known], intents[at : at + is_known]
                workloads.pop(key, None)
                continue
            found = workloads[key] = self._resolved(new, new.value, known.workloads)
            order[at : at + is_known], intents[at : at + is_known] = [key], [found.intent]
            if _is_doubtful(found, known.quotas):
                doubtful.add(key)
        return replace(
            known,
            workloads=workloads.finish(),
            order=tuple(order),
            intents=tuple(intents),
            doubtful=frozenset(doubtful),
            number=number,
        )

    def _resolved(
        self, stored: StoredDocument, workload: Any, earlier: Mapping[DocumentKey, ResolvedWorkload]
    ) -> ResolvedWorkload:
        sources, before = self._sources(stored, workload), earlier.get(stored.key)
        if before is None or not _is_same(before.sources, sources):
            before = self._resolve(stored, workload, sources)
        return before

    def _sources(self, stored: StoredDocument, workload: Workload) -> Sequence[object]:
        """Everything that `_resolve` reads of the catalog."""
        found: list[object] = [stored, self.documents.get(DocumentKey("Policy", workload.spec.policy or ""))]
        for digest in stored.pinned.values():
            found += (self.models.get(digest), self.packs.get(digest), self._pushed_packs.get(digest))
        return found

    def _resolve(self, stored: StoredDocument, workload: Workload, sources: Sequence[object]) -> ResolvedWorkload:
        policy, pack = self.policy(workload.spec.policy), self.pack_of(workload, stored.pinned)
        digests = self._refs(stored.pinned)
        intent = resolve(workload, policy, revision=stored.revision, digests=digests, pack=pack)
        has_problems = no_reference(workload, policy, pack) is not None or (
            policy is not None and any(True for _ in check_with_policy(workload, policy))
        )
        packs = self._warm_packs(workload, stored.pinned)
        lacks_policy = workload.spec.policy is not None and policy is None
        return ResolvedWorkload(sources, replace(intent, back=stored.back, packs=packs), has_problems, lacks_policy)

    @property
    def rtt_s(self) -> Mapping[str, Seconds]:
        """RTT to the origin region of each guest, by the guest workload's name."""
        return {guest.intent.key.name: guest.rtt_s for guest in self.guests}

    @property
    def quotas(self) -> Mapping[str, Quota]:
        return self.resolution.quotas

    @lazy_property
    def profiles(self) -> Mapping[str, ModelProfile]:
        return {digest: model.profile for digest, model in self.models.items()}

    @property
    def number(self) -> int:
        """Of all documents, as the hash of a plan has them."""
        return self.resolution.number

    def facts(self, region: str, signals: Mapping[SignalName, Signal] = MappingProxyType({})) -> RegionFacts:
        document = self.region(region)
        residency = (document.spec.location.residency or "") if document is not None else ""
        carbon = signals.get(SignalName.CARBON)
        sleep = document.spec.sleep if document is not None else None
        return RegionFacts(
            region,
            residency,
            carbon_g_per_kwh=carbon.value if carbon is not None else math.nan,
            sleep_after_s=sleep.after if sleep is not None else None,
        )

    def rules(self, region: str) -> Mapping[SignalName, SignalRule]:
        """The signal rules of the Region document, for the signals that it names."""
        document = self.region(region)
        if document is None:
            return {}
        spec = document.spec
        said = {SignalName.PRICE: spec.price, SignalName.CARBON: spec.carbon}
        return {name: _rule(value) for name, value in said.items() if value is not None}

    def region(self, name: str) -> Region | None:
        stored = self.documents.get(DocumentKey("Region", name))
        return stored.value if stored is not None and isinstance(stored.value, Region) else None

    def trades(self, region: str) -> tuple[TradeRule, ...]:
        """Regions that this region runs workloads for; empty without a Region document."""
        document = self.region(region)
        return trades(document) if document is not None else ()

    def signatures(self, region: str, verify: VerifyBundle) -> Signatures:
        """The publishers' keys that the region declares, and the valid signatures by digest."""
        keys = publisher_keys(self.region(region))
        bundles = {digest: model.signatures for digest, model in self.models.items() if model.signatures}
        return Signatures(keys, signatures(bundles, keys, self.newest, verify))

    def signature_checks(self, region: str, model: ModelRecord, verify: VerifyBundle) -> tuple[SignatureCheck, ...]:
        """Each signature of a model, with the reason where it is not valid."""
        keys = publisher_keys(self.region(region))
        return tuple(check_signature(bundle, model.digest, keys, verify) for bundle in model.signatures)

    def users_of(self, digest: str) -> tuple[str, ...]:
        """Names of workloads that are pinned to a model or pack, and of guests that run the model."""
        own = tuple(stored.name for stored, _ in self.of_kind(Workload) if digest in stored.pinned.values())
        guests = tuple(
            str(guest.intent.key)
            for guest in self.guests
            if any(model.digest == digest for model in guest.intent.models)
        )
        return (*own, *guests)

    def pack_of(self, workload: Workload, pinned: Mapping[str, str]) -> PackRef | None:
        """The samples of a workload; None where it has none."""
        model = workload.spec.model
        pack = self.packs.get(pinned.get(model.samples, "")) if model.samples is not None else None
        return pack.read_for.get(pinned.get(model.source, "")) if pack is not None else None

    def _warm_packs(self, workload: Workload, pinned: Mapping[str, str]) -> Mapping[str, PackRef]:
        """Warm-up samples by model digest: the workload's own samples, else the newest ones pushed for the model."""
        own = self.packs.get(pinned.get(workload.spec.model.samples or "", ""))
        own_packs = own.read_for if own is not None else {}
        found = {model: own_packs.get(model) or self._pushed_packs.get(model) for model in pinned.values()}
        return {model: pack for model, pack in found.items() if pack is not None}

    @lazy_property
    def _pushed_packs(self) -> Mapping[str, PackRef]:
        """The newest samples that people pushed, by model."""
        pushed = (each for each in self.packs.values() if not each.recorded)
        return {
            model: pack
            for each in sorted(pushed, key=lambda each: each.pushed_at)
            for model, pack in each.read_for.items()
        }

    @lazy_property
    def references(self) -> References:
        """Recorded reference answers, by (model as in `variant_of`, samples digest)."""
        return {
            (each.variant, each.samples): Reference(pack.read_for[each.model], each.assignment)
            for pack in self.packs.values()
            for each in pack.recorded
        }

    def provenance(self, digest: str, model: str) -> Provenance | None:
        """Who recorded that reference of the model; None where no replica did."""
        pack = self.packs.get(digest)
        return next((each for each in pack.recorded if each.model == model), None) if pack is not None else None

    def _refs(self, pinned: Mapping[str, str]) -> dict[str, ModelRef]:
        return {
            source: ModelRef(source, digest, self.models[digest].profile.precision)
            for source, digest in pinned.items()
            if digest in self.models
        }


def _is_doubtful(found: ResolvedWorkload, quotas: Mapping[str, Quota]) -> bool:
    """Whether a check with other documents may find something about a stored workload."""
    tenant = found.intent.key.tenant
    return found.has_problems or found.lacks_policy or not (tenant in quotas or tenant == DEFAULT_TENANT)


def _rule(said: float | PriceFeed | CarbonFeed) -> SignalRule:
    match said:
        case PriceFeed():
            return SignalRule(None, said.source, said.stale_after)
        case CarbonFeed():
            return SignalRule(None, said.source, said.stale_after, said.fallback)
        case constant:
            return SignalRule(constant)


def _is_same(before: Sequence[object], now: Sequence[object]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))
