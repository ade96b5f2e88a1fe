"""The applied documents and pushed models as values: what a proposal would change, what the engine reads of them."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from shoal.coordinator.controllers.publishers import Judged, Newest, declared, judge, signatures, went_back
from shoal.coordinator.core.graph.state import misfits
from shoal.coordinator.core.placement.model import DocumentRef, Publisher, RegionFacts, Signatures
from shoal.coordinator.core.signals.model import Rule, Signal, SignalName
from shoal.coordinator.core.workloads.model import Reference, References
from shoal.policies import (
    Document,
    Kind,
    Policy,
    Problem,
    Region,
    Tenant,
    Workload,
    canonical,
    canonical_text,
    cross_check,
    load,
    quota,
    read,
    resolve,
    trades,
)
from shoal.policies.kinds import CarbonFeed, PriceFeed, StateTensors
from shoal.types.agreement import GUESTS
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.migration import PackRef
from shoal.types.profile import ModelProfile
from shoal.types.units import Seconds, Wall
from shoal.types.workload import Intent, ModelRef, Quota, Trade, WorkloadKey

DOCUMENTS: Final = "documents/"
MODELS: Final = "models/"
PACKS: Final = "packs/"


class DocumentKey(NamedTuple):
    """kind: as in the document (`Workload`). name: `tenant/name` of a workload, else the name."""

    kind: str
    name: str

    @property
    def stored_at(self) -> str:
        return f"{DOCUMENTS}{self.kind.lower()}/{self.name}"


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """text: canonical, one line. pinned: each model source of a workload, and its samples -> digest, as it was when
    applied."""

    kind: str
    name: str
    text: str
    revision: int
    applied_at: Wall
    applied_by: str
    pinned: Mapping[str, str] = field(default_factory=dict)
    back: bool = False
    """A rollback brought it back."""

    @property
    def key(self) -> DocumentKey:
        return DocumentKey(self.kind, self.name)

    @property
    def value(self) -> Kind:
        return _value(self.text)

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.text}\n{json.dumps(dict(self.pinned), sort_keys=True)}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One pushed model. names: as it was pushed, the newest push of a name owns it.

    signatures: publishers' bundles over it, as they were pushed, one of each key. lent: by which region, for what it
    has run here: no document of this region may name it. Empty where it was pushed here.
    """

    digest: str
    names: tuple[str, ...]
    pushed_at: Wall
    pushed_by: str
    profile: ModelProfile
    signatures: tuple[bytes, ...] = ()
    lent: str = ""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which replica answered so, and when. samples: digest of the pack with the inputs; empty: they were made up."""

    model: str
    samples: str
    workload: WorkloadKey
    assignment: str
    node: str
    device: str
    provider: str
    runtime_version: str
    precision: str
    at: Wall

    def __str__(self) -> str:
        runs = " ".join(filter(None, (self.provider, self.runtime_version, self.precision)))
        return f"{self.node}/{self.device} ({runs})"


@dataclass(frozen=True, slots=True)
class PackRecord:
    """One pack of samples, pushed or recorded. read_for: by digest of each model that it was inspected for, what it
    holds for it. recorded: of models that it is the reference of, because a replica answered so."""

    digest: str
    pushed_at: Wall
    pushed_by: str
    read_for: Mapping[str, PackRef]
    recorded: tuple[Provenance, ...] = ()


@dataclass(frozen=True, slots=True)
class Guest:
    """What this region runs for another under an agreement. way_s: there and back between the two."""

    region: str
    intent: Intent
    way_s: Seconds


@dataclass(frozen=True, slots=True)
class DocumentChange:
    """sign: `+`, `~` or `-`. lines: of a `~`, each field as it was (`- `) and as it shall be (`+ `)."""

    sign: str
    kind: str
    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Catalog:
    """All that people told the region. models: by digest. newest: signed versions that were seen, by line. guests: what
    other regions have run here, which no document tells. packs: by digest."""

    documents: Mapping[DocumentKey, StoredDocument] = field(default_factory=dict)
    models: Mapping[str, ModelRecord] = field(default_factory=dict)
    newest: Mapping[str, Newest] = field(default_factory=dict)
    guests: tuple[Guest, ...] = ()
    packs: Mapping[str, PackRecord] = field(default_factory=dict)

    def digest_of(self, source: str) -> str | None:
        """Of a model that was pushed here, by digest or name."""
        if source in self.models and not self.models[source].lent:
            return source
        return next((digest for digest, model in self.models.items() if source in model.names), None)

    def of_kind(self, kind: type[Kind]) -> Iterator[tuple[StoredDocument, Any]]:
        for key in sorted(self.documents):
            if isinstance(value := self.documents[key].value, kind):
                yield self.documents[key], value

    def policy(self, name: str | None) -> Policy | None:
        stored = self.documents.get(DocumentKey("Policy", name or ""))
        return stored.value if stored is not None and isinstance(stored.value, Policy) else None

    @property
    def intents(self) -> tuple[Intent, ...]:
        """In order of names, then guests. Raises ShoalError(MODEL_UNKNOWN) only if a pinned model is gone, which
        removal forbids."""
        own = tuple(
            replace(
                resolve(
                    workload,
                    self.policy(workload.spec.policy),
                    revision=stored.revision,
                    digests=self._refs(stored.pinned),
                    pack=self.pack_of(workload, stored.pinned),
                ),
                back=stored.back,
            )
            for stored, workload in self.of_kind(Workload)
        )
        return (*own, *(guest.intent for guest in self.guests))

    @property
    def rtt_s(self) -> Mapping[str, Seconds]:
        """From the one origin of each guest's requests."""
        return {guest.intent.key.name: guest.way_s for guest in self.guests}

    @property
    def quotas(self) -> Mapping[str, Quota]:
        return {tenant.metadata.name: quota(tenant) for _, tenant in self.of_kind(Tenant)}

    @property
    def profiles(self) -> Mapping[str, ModelProfile]:
        return {digest: model.profile for digest, model in self.models.items()}

    @property
    def refs(self) -> tuple[DocumentRef, ...]:
        return tuple(
            DocumentRef(stored.kind, stored.name, stored.digest) for _, stored in sorted(self.documents.items())
        )

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

    def rules(self, region: str) -> Mapping[SignalName, Rule]:
        """What the region's document says of its signals, of those that it names."""
        document = self.region(region)
        if document is None:
            return {}
        spec = document.spec
        said = {SignalName.PRICE: spec.price, SignalName.CARBON: spec.carbon}
        return {name: _rule(value) for name, value in said.items() if value is not None}

    def region(self, name: str) -> Region | None:
        stored = self.documents.get(DocumentKey("Region", name))
        return stored.value if stored is not None and isinstance(stored.value, Region) else None

    def trades(self, region: str) -> tuple[Trade, ...]:
        """Whom the region works for; nobody where it does not say."""
        document = self.region(region)
        return trades(document) if document is not None else ()

    def signatures(self, region: str) -> Signatures:
        """Keys that the region declares, and what they signed."""
        keys = declared(self.region(region))
        bundles = {digest: model.signatures for digest, model in self.models.items() if model.signatures}
        return Signatures(keys, signatures(bundles, keys, self.newest))

    def judged(self, region: str, model: ModelRecord) -> tuple[Judged, ...]:
        """Each signature of a model, and why it does not count where it does not."""
        keys = declared(self.region(region))
        return tuple(judge(bundle, model.digest, keys) for bundle in model.signatures)

    def users_of(self, digest: str) -> tuple[str, ...]:
        """Workloads that are pinned to a model, and guests that run it."""
        own = tuple(stored.name for stored, _ in self.of_kind(Workload) if digest in stored.pinned.values())
        lodged = tuple(
            str(guest.intent.key)
            for guest in self.guests
            if any(model.digest == digest for model in guest.intent.models)
        )
        return (*own, *lodged)

    def pack_of(self, workload: Workload, pinned: Mapping[str, str]) -> PackRef | None:
        """A workload's samples; every one of its models can read them."""
        model = workload.spec.model
        pack = self.packs.get(pinned.get(model.samples, "")) if model.samples is not None else None
        return pack.read_for.get(pinned.get(model.source, "")) if pack is not None else None

    @property
    def references(self) -> References:
        """What replicas recorded."""
        return {
            (each.model, each.samples): Reference(pack.read_for[each.model], each.assignment)
            for pack in self.packs.values()
            for each in pack.recorded
        }

    def provenance(self, digest: str, model: str) -> Provenance | None:
        """Who recorded that reference of the model; None where nobody did."""
        pack = self.packs.get(digest)
        return next((each for each in pack.recorded if each.model == model), None) if pack is not None else None

    def _refs(self, pinned: Mapping[str, str]) -> dict[str, ModelRef]:
        return {
            source: ModelRef(source, digest, self.models[digest].profile.precision)
            for source, digest in pinned.items()
            if digest in self.models
        }


@dataclass(frozen=True, slots=True)
class Proposal:
    """What applying some documents would make of the catalog. problems: none of it may be applied."""

    catalog: Catalog
    changes: tuple[DocumentChange, ...]
    problems: tuple[Problem, ...]

    @property
    def changed(self) -> tuple[DocumentKey, ...]:
        return tuple(DocumentKey(change.kind, change.name) for change in self.changes)


def propose(
    catalog: Catalog,
    texts: Sequence[tuple[str, str]],
    digests: Mapping[str, str],
    *,
    region: str,
    actor: str,
    wall: Wall,
    back: bool = False,
) -> Proposal:
    """Documents laid over the catalog. digests: model source as written -> digest of what was pushed for it. back: by a
    rollback."""
    loaded = load(texts)
    given = {DocumentKey(document.kind, document.name): document for document in loaded.documents}
    kept = [
        document
        for key, stored in catalog.documents.items()
        if key not in given
        for document in load([(f"stored {stored.kind} {stored.name}", stored.text)]).documents
    ]
    problems = [*loaded.problems]
    if not problems:
        problems += cross_check((*loaded.documents, *kept), (), ())
    documents = dict(catalog.documents)
    changes = []
    for key, document in given.items():
        if key.kind == "Region" and key.name != region:
            refusal = Refusal(Code.REGION_MISMATCH, f"region {key.name}", f"region {region}", "apply it to that region")
            problems.append(document.problem(("metadata", "name"), refusal))
            continue
        if GUESTS in (key.name, key.name.partition("/")[0]) and key.kind in ("Tenant", "Workload"):
            refusal = Refusal(
                Code.NAME_INVALID, f"tenant {GUESTS}", "a name of your own", "it is of other regions' work"
            )
            problems.append(document.problem(("metadata", "name" if key.kind == "Tenant" else "tenant"), refusal))
            continue
        before = documents.get(key)
        pinned, missing = _pin(catalog, document, digests, region, before)
        problems += missing
        problems += _stateless(catalog, document, pinned)
        after = StoredDocument(*key, canonical_text(document.value), 1, wall, actor, pinned)
        if before is None:
            changes.append(DocumentChange("+", *key, tuple(_lines(after))))
        elif (before.text, before.pinned) != (after.text, after.pinned):
            after = replace(after, revision=before.revision + 1, back=back)
            changes.append(DocumentChange("~", *key, tuple(differences(before, after))))
        else:
            after = before
        documents[key] = after
    proposed = replace(catalog, documents=documents)
    if not problems:
        problems += [problem for document in (*given.values(), *kept) for problem in _referring(proposed, document)]
    problems += _publishers(tuple(given.values()), declared(proposed.region(region)))
    return Proposal(proposed, tuple(changes), tuple(problems))


def without(catalog: Catalog, key: DocumentKey) -> Catalog:
    """Raises ShoalError(NOT_FOUND | WORKLOAD_UNKNOWN | IN_USE)."""
    if key not in catalog.documents:
        code = Code.WORKLOAD_UNKNOWN if key.kind == "Workload" else Code.NOT_FOUND
        raise ShoalError(
            Refusal(code, f"{key.kind} {key.name!r:.120}", "an applied document", f"see `shoal get {key.kind.lower()}`")
        )
    users = [
        stored.name
        for stored, workload in catalog.of_kind(Workload)
        if (key.kind == "Policy" and workload.spec.policy == key.name)
        or (key.kind == "Tenant" and workload.metadata.tenant == key.name)
    ]
    if users:
        raise ShoalError(
            Refusal(Code.IN_USE, f"{key.kind} {key.name} is used by {', '.join(users)}", "one that nothing uses",
                    f"delete {'it' if len(users) == 1 else 'them'} first")
        )  # fmt: skip
    return replace(catalog, documents={other: stored for other, stored in catalog.documents.items() if other != key})


def _pin(
    catalog: Catalog, document: Document, digests: Mapping[str, str], region: str, before: StoredDocument | None
) -> tuple[dict[str, str], list[Problem]]:
    if not isinstance(document.value, Workload):
        return {}, []
    model = document.value.spec.model
    places: list[tuple[str, tuple[int | str, ...]]] = [(model.source, ("spec", "model", "source"))]
    places += [
        (variant.source, ("spec", "model", "variants", index, "source")) for index, variant in enumerate(model.variants)
    ]
    pinned, missing = {}, []
    for source, path in places:
        digest = catalog.digest_of(digests.get(source, source))
        if digest is None:
            refusal = Refusal(
                Code.MODEL_UNKNOWN,
                f"{source!r:.120}",
                "the name or digest of a pushed model",
                f"push it first: shoal model push {source!s:.120}",
            )
            missing.append(document.problem(path, refusal))
            continue
        pinned[source] = digest
        if before is None or digest not in before.pinned.values():
            missing += [document.problem(path, refusal) for refusal in _rollbacks(catalog, region, digest)]
    if model.samples is not None and not missing:
        digest = digests.get(model.samples, model.samples)
        pack = catalog.packs.get(digest)
        unread = [each for each in pinned.values() if pack is None or each not in pack.read_for]
        if unread:
            refusal = Refusal(
                Code.MODEL_UNKNOWN,
                f"{model.samples!r:.120}, of which nothing is known for {unread[0]}",
                "the file, or the digest of samples that were pushed for each of the models",
                "name the .npz file: `shoal apply` pushes it",
            )
            missing.append(document.problem(("spec", "model", "samples"), refusal))
        pinned[model.samples] = digest
    return pinned, missing


def _referring(catalog: Catalog, document: Document) -> Iterator[Problem]:
    """A policy that judges by a reference needs one: pushed, or what a first replica will answer."""
    workload = document.value
    if not isinstance(workload, Workload) or (policy := catalog.policy(workload.spec.policy)) is None:
        return
    verify = policy.spec.migration.verify if policy.spec.migration is not None else None
    if verify is None or verify.against != "reference":
        return
    stored = catalog.documents[DocumentKey(document.kind, document.name)]
    pack = catalog.pack_of(workload, stored.pinned)
    if isinstance(workload.spec.session, StateTensors) and (pack is None or not pack.answers):
        refusal = Refusal(
            Code.VERIFY_IMPOSSIBLE,
            f"policy {policy.metadata.name} verifies against a reference, {document.name} has none and keeps sessions",
            "spec.model.samples with every output of the model: nothing is recorded of what keeps state",
            "write the outputs into the .npz beside the inputs, or verify against: source",
        )
        yield document.problem(("spec", "model"), refusal)


def _stateless(catalog: Catalog, document: Document, pinned: Mapping[str, str]) -> Iterator[Problem]:
    """State that its models do not take or give."""
    workload = document.value
    if isinstance(workload, Workload) and isinstance(workload.spec.session, StateTensors):
        for source, digest in pinned.items():
            for name, refusal in misfits(catalog.models[digest].profile, workload.spec.session.state, source):
                yield document.problem(("spec", "session", "state", name), refusal)


def _rollbacks(catalog: Catalog, region: str, digest: str) -> Iterator[Refusal]:
    """Why a model may not be pinned anew; what a workload is pinned to already was the newest, or allowed, then."""
    for judged in catalog.judged(region, catalog.models[digest]):
        if judged.signed is not None and (refusal := went_back(judged.signed, catalog.newest.get(judged.signed.line))):
            yield refusal


def _publishers(documents: Sequence[Document], keys: Mapping[str, Publisher]) -> Iterator[Problem]:
    """Keys that policies name and the region does not know."""
    for document in documents:
        if isinstance(policy := document.value, Policy) and (trust := policy.spec.require.trust) is not None:
            for index, name in enumerate(trust.signed_model.keys if trust.signed_model is not None else ()):
                if name not in keys:
                    yield document.problem(
                        ("spec", "require", "trust", "signed_model", "keys", index),
                        Refusal(
                            Code.PUBLISHER_UNKNOWN,
                            f"key {name}",
                            f"one of {', '.join(sorted(keys)) or 'none yet'}",
                            "declare it under spec.keys of the Region, with this document or before it",
                        ),
                    )


def _rule(said: float | PriceFeed | CarbonFeed) -> Rule:
    match said:
        case PriceFeed():
            return Rule(None, said.source, said.stale_after)
        case CarbonFeed():
            return Rule(None, said.source, said.stale_after, said.fallback)
        case constant:
            return Rule(constant)


def differences(before: StoredDocument, after: StoredDocument) -> Iterator[str]:
    """Each field that differs, as it was (`- `) and as it is (`+ `)."""
    old, new = dict(_fields(before)), dict(_fields(after))
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            if name in old:
                yield f"- {name}: {old[name]}"
            if name in new:
                yield f"+ {name}: {new[name]}"


def _lines(stored: StoredDocument) -> Iterator[str]:
    return (f"{name}: {value}" for name, value in _fields(stored))


def _fields(stored: StoredDocument) -> Iterator[tuple[str, str]]:
    """Each leaf of the document by its path, then the pinned digests."""
    yield from _leaves("spec", canonical(stored.value).get("spec", {}))
    labels = canonical(stored.value)["metadata"].get("labels", {})
    yield from _leaves("metadata.labels", labels)
    for source, digest in stored.pinned.items():
        yield f"pinned {source}", digest


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    elif isinstance(value, list | tuple) and any(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(f"{path}[{index}]", inner)
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


@lru_cache(maxsize=4096)
def _value(text: str) -> Kind:
    return read(json.loads(text))
