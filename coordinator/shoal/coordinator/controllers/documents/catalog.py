"""Applied documents and pushed models as values: what a proposal would change, and what placement reads of them."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from shoal.coordinator.controllers.documents.publishers import (
    NewestVersion,
    SignatureCheck,
    check_signature,
    publisher_keys,
    rollback_refusal,
    signatures,
)
from shoal.coordinator.core.graph.session_state import session_state_problems
from shoal.coordinator.core.placement.model import DocumentRef, RegionFacts, Signatures, TrustedKey
from shoal.coordinator.core.signals.model import Signal, SignalName, SignalRule
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
from shoal.types.agreement import GUEST_TENANT
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.migration import PackRef
from shoal.types.profile import ModelProfile
from shoal.types.units import Seconds, Wall
from shoal.types.workload import Intent, ModelRef, Quota, TradeRule, WorkloadKey

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


@dataclass(frozen=True, slots=True)
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
    lent: str = ""


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
class DocumentChange:
    """One document that a proposal adds, changes or removes."""

    # `+` added, `~` changed or `-` removed.
    sign: str
    kind: str
    name: str
    # All fields of an added document; for a changed one each field that differs (`differences`).
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
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

    def digest_of(self, source: str) -> str | None:
        """The digest of a model pushed here, by digest or name; None if there is none."""
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
        """Own workloads in order of names, then guests. Raises ShoalError(MODEL_UNKNOWN) only if a pinned model is
        missing, which `remove` prevents.
        """
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
                packs=self._warm_packs(workload, stored.pinned),
            )
            for stored, workload in self.of_kind(Workload)
        )
        return (*own, *(guest.intent for guest in self.guests))

    @property
    def rtt_s(self) -> Mapping[str, Seconds]:
        """RTT to the origin region of each guest, by the guest workload's name."""
        return {guest.intent.key.name: guest.rtt_s for guest in self.guests}

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

    def signatures(self, region: str) -> Signatures:
        """The publishers' keys that the region declares, and the valid signatures by digest."""
        keys = publisher_keys(self.region(region))
        bundles = {digest: model.signatures for digest, model in self.models.items() if model.signatures}
        return Signatures(keys, signatures(bundles, keys, self.newest))

    def signature_checks(self, region: str, model: ModelRecord) -> tuple[SignatureCheck, ...]:
        """Each signature of a model, with the reason where it is not valid."""
        keys = publisher_keys(self.region(region))
        return tuple(check_signature(bundle, model.digest, keys) for bundle in model.signatures)

    def users_of(self, digest: str) -> tuple[str, ...]:
        """Names of workloads that are pinned to a model or pack, and of guests that run the model."""
        own = tuple(stored.name for stored, _ in self.of_kind(Workload) if digest in stored.pinned.values())
        lodged = tuple(
            str(guest.intent.key)
            for guest in self.guests
            if any(model.digest == digest for model in guest.intent.models)
        )
        return (*own, *lodged)

    def pack_of(self, workload: Workload, pinned: Mapping[str, str]) -> PackRef | None:
        """The samples of a workload; None where it has none."""
        model = workload.spec.model
        pack = self.packs.get(pinned.get(model.samples, "")) if model.samples is not None else None
        return pack.read_for.get(pinned.get(model.source, "")) if pack is not None else None

    def _warm_packs(self, workload: Workload, pinned: Mapping[str, str]) -> Mapping[str, PackRef]:
        """Warm-up samples by model digest: the workload's own samples, else the newest ones pushed for the model."""
        own = self.packs.get(pinned.get(workload.spec.model.samples or "", ""))
        pushed = sorted((each for each in self.packs.values() if not each.recorded), key=lambda each: each.pushed_at)
        found: dict[str, PackRef] = {}
        for each in (*pushed, *filter(None, (own,))):
            found.update({model: pack for model, pack in each.read_for.items() if model in pinned.values()})
        return found

    @property
    def references(self) -> References:
        """Recorded reference answers, by (model digest, samples digest)."""
        return {
            (each.model, each.samples): Reference(pack.read_for[each.model], each.assignment)
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


@dataclass(frozen=True, slots=True)
class DocumentProposal:
    """The catalog that some documents would result in. With problems, nothing may be applied."""

    # The catalog after the change.
    catalog: Catalog
    # Documents that would be added or changed.
    changes: tuple[DocumentChange, ...]
    # Why nothing may be applied; empty: it may.
    problems: tuple[Problem, ...]

    @property
    def changed_keys(self) -> tuple[DocumentKey, ...]:
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
) -> DocumentProposal:
    """Merges documents into the catalog. digests: model source as written -> digest of what was pushed for it. back:
    the documents come from a rollback.
    """
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
        if GUEST_TENANT in (key.name, key.name.partition("/")[0]) and key.kind in ("Tenant", "Workload"):
            refusal = Refusal(
                Code.NAME_INVALID, f"tenant {GUEST_TENANT}", "a name of your own", "it is of other regions' work"
            )
            problems.append(document.problem(("metadata", "name" if key.kind == "Tenant" else "tenant"), refusal))
            continue
        before = documents.get(key)
        pinned, missing = _pin(catalog, document, digests, region, before)
        problems += missing
        problems += _state_problems(catalog, document, pinned)
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
        problems += [
            problem for document in (*given.values(), *kept) for problem in _reference_problems(proposed, document)
        ]
    problems += _publisher_problems(tuple(given.values()), publisher_keys(proposed.region(region)))
    return DocumentProposal(proposed, tuple(changes), tuple(problems))


def without_document(catalog: Catalog, key: DocumentKey) -> Catalog:
    """The catalog without one document. Raises ShoalError(NOT_FOUND | WORKLOAD_UNKNOWN | IN_USE)."""
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
            missing += [document.problem(path, refusal) for refusal in _rollback_refusals(catalog, region, digest)]
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


def _reference_problems(catalog: Catalog, document: Document) -> Iterator[Problem]:
    """A policy that verifies against a reference needs one: pushed answers, or a recording of the first replica."""
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


def _state_problems(catalog: Catalog, document: Document, pinned: Mapping[str, str]) -> Iterator[Problem]:
    """Session state tensors that a model lacks as input or output."""
    workload = document.value
    if isinstance(workload, Workload) and isinstance(workload.spec.session, StateTensors):
        for source, digest in pinned.items():
            if source == workload.spec.model.samples:  # a pack, not a model
                continue
            for name, refusal in session_state_problems(
                catalog.models[digest].profile, workload.spec.session.state, source
            ):
                yield document.problem(("spec", "session", "state", name), refusal)


def _rollback_refusals(catalog: Catalog, region: str, digest: str) -> Iterator[Refusal]:
    """Why a model may not be newly pinned. A model already pinned was the newest version, or allowed, at that time."""
    for judged in catalog.signature_checks(region, catalog.models[digest]):
        if judged.statement is not None and (
            refusal := rollback_refusal(judged.statement, catalog.newest.get(judged.statement.lineage))
        ):
            yield refusal


def _publisher_problems(documents: Sequence[Document], keys: Mapping[str, TrustedKey]) -> Iterator[Problem]:
    """Publishers' keys that policies name and the region does not declare."""
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


def _rule(said: float | PriceFeed | CarbonFeed) -> SignalRule:
    match said:
        case PriceFeed():
            return SignalRule(None, said.source, said.stale_after)
        case CarbonFeed():
            return SignalRule(None, said.source, said.stale_after, said.fallback)
        case constant:
            return SignalRule(constant)


def differences(before: StoredDocument, after: StoredDocument) -> Iterator[str]:
    """Each field that differs: `~ NAME: OLD -> NEW`, `- NAME: OLD` if removed, `+ NAME: NEW` if added."""
    old, new = dict(_fields(before)), dict(_fields(after))
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) == new.get(name):
            continue
        if name not in new:
            yield f"- {name}: {old[name]}"
        elif name not in old:
            yield f"+ {name}: {new[name]}"
        else:
            yield f"~ {name}: {old[name]} -> {new[name]}"


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
