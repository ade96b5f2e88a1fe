"""What applying some documents would make of the catalog, and why they may not be applied."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from shoal.coordinator.core.catalog.checks import no_reference
from shoal.coordinator.core.catalog.differences import DocumentChange, differences, lines
from shoal.coordinator.core.catalog.model import Catalog, DocumentKey, StoredDocument
from shoal.coordinator.core.catalog.publishers import VerifyBundle, publisher_keys, rollback_refusal
from shoal.coordinator.core.graph.session_state import session_state_problems
from shoal.coordinator.core.placement.model import TrustedKey
from shoal.policies import (
    DEFAULT_TENANT,
    Document,
    Policy,
    Problem,
    Tenant,
    Workload,
    bounded_problems,
    canonical_text,
    load,
    nearest_name,
    reference_problems,
    some_names,
)
from shoal.policies.documents import MAX_SHOWN
from shoal.policies.kinds import StateTensors
from shoal.policies.resolve import push_command
from shoal.types.agreement import GUEST_TENANT
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Wall


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
    verify: VerifyBundle,
    back: bool = False,
) -> DocumentProposal:
    """Merges documents into the catalog. Only `texts` are parsed: stored documents keep what they were parsed to.

    digests: model source as written -> digest of what was pushed for it. back: the documents come from a rollback.
    Problems are found and listed up to `shoal.policies.documents.MAX_SHOWN`.
    """
    loaded = load(texts)
    given = {DocumentKey(document.kind, document.name): document for document in loaded.documents}
    suspects = tuple(_suspects(catalog, given))
    problems = [*loaded.problems]
    if not problems:
        problems += bounded_problems(_cross_problems(catalog, given, suspects))
    changed = dict[DocumentKey, StoredDocument]()
    changes = []
    for key, document in given.items():
        if len(problems) > MAX_SHOWN:  # nothing may be applied, and no more of them is shown
            break
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
        before = catalog.documents.get(key)
        pinned, missing = _pin(catalog, document, digests, region, before, verify)
        problems += missing
        problems += _state_problems(catalog, document, pinned)
        after = StoredDocument(*key, canonical_text(document.value), 1, wall, actor, pinned)
        if before is None:
            changes.append(DocumentChange("+", *key, tuple(lines(after))))
        elif (before.text, before.pinned) != (after.text, after.pinned):
            after = replace(after, revision=before.revision + 1, back=back)
            changes.append(DocumentChange("~", *key, tuple(differences(before, after))))
        else:
            continue
        changed[key] = after
    proposed = catalog.with_documents(changed)
    if not problems:
        problems += [
            problem for document in (*given.values(), *suspects) for problem in _policy_problems(proposed, document)
        ]
    unsigned = _publisher_problems(tuple(given.values()), publisher_keys(proposed.region(region)))
    return DocumentProposal(proposed, tuple(changes), tuple(bounded_problems(chain(problems, unsigned))))


def _suspects(catalog: Catalog, given: Mapping[DocumentKey, Document]) -> Iterator[Document]:
    """Stored workloads that a check with other documents may find something about, once the given ones are applied."""
    policies, tenants = _policies(catalog, given), _tenants(catalog, given)
    has_policy = any(key.kind == "Policy" for key in given)
    for key in catalog.resolution.order if has_policy else sorted(catalog.resolution.doubtful):
        resolved, stored = catalog.workloads[key], catalog.documents[key]
        workload = stored.value
        if key in given or not isinstance(workload, Workload):
            continue
        name = workload.spec.policy
        has_changed = name is not None and (name not in policies or DocumentKey("Policy", name) in given)
        if resolved.has_problems or has_changed or workload.metadata.tenant not in tenants:
            yield stored.document


def _cross_problems(
    catalog: Catalog, given: Mapping[DocumentKey, Document], suspects: Sequence[Document]
) -> Iterator[Problem]:
    policies, tenants = _policies(catalog, given), _tenants(catalog, given)
    for document in (*given.values(), *suspects):
        yield from reference_problems(document, policies, tenants)


def _policies(catalog: Catalog, given: Mapping[DocumentKey, Document]) -> Mapping[str, Policy]:
    values = (document.value for document in given.values())
    return catalog.policies | {value.metadata.name: value for value in values if isinstance(value, Policy)}


def _tenants(catalog: Catalog, given: Mapping[DocumentKey, Document]) -> frozenset[str]:
    names = (document.name for document in given.values() if isinstance(document.value, Tenant))
    return frozenset((DEFAULT_TENANT, *catalog.quotas, *names))


def without_document(catalog: Catalog, key: DocumentKey) -> Catalog:
    """The catalog without one document. Raises ShoalError(NOT_FOUND | WORKLOAD_UNKNOWN | IN_USE)."""
    if key not in catalog.documents:
        code = Code.WORKLOAD_UNKNOWN if key.kind == "Workload" else Code.NOT_FOUND
        raise ShoalError(
            Refusal(code, f"{key.kind} {key.name!r:.120}", "an applied document", f"see `shoal get {key.kind.lower()}`")
        )
    users = [
        stored.name
        for stored, workload in (catalog.of_kind(Workload) if key.kind in ("Policy", "Tenant") else ())
        if (key.kind == "Policy" and workload.spec.policy == key.name)
        or (key.kind == "Tenant" and workload.metadata.tenant == key.name)
    ]
    if users:
        raise ShoalError(
            Refusal(Code.IN_USE, f"{key.kind} {key.name} is used by {some_names('', users)}", "one that nothing uses",
                    f"delete {'that workload' if len(users) == 1 else 'those workloads'} first")
        )  # fmt: skip
    return catalog.with_documents({}, [key])


def _pin(
    catalog: Catalog,
    document: Document,
    digests: Mapping[str, str],
    region: str,
    before: StoredDocument | None,
    verify: VerifyBundle,
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
            near = nearest_name(source, sorted({name for each in catalog.models.values() for name in each.names}))
            refusal = Refusal(
                Code.MODEL_UNKNOWN,
                f"no model {source!r:.120}",
                "the name or digest of a pushed model",
                f"{f'did you mean {near}? Else ' if near else ''}push it first: {push_command(source)}",
            )
            missing.append(document.problem(path, refusal))
            continue
        pinned[source] = digest
        if before is None or digest not in before.pinned.values():
            refusals = _rollback_refusals(catalog, region, digest, verify)
            missing += [document.problem(path, refusal) for refusal in refusals]
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


def _policy_problems(catalog: Catalog, document: Document) -> Iterator[Problem]:
    workload = document.value
    if isinstance(workload, Workload):
        pinned = catalog.documents[DocumentKey(document.kind, document.name)].pinned
        refusal = no_reference(workload, catalog.policy(workload.spec.policy), catalog.pack_of(workload, pinned))
        if refusal is not None:
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


def _rollback_refusals(catalog: Catalog, region: str, digest: str, verify: VerifyBundle) -> Iterator[Refusal]:
    """Why a model may not be newly pinned. A model already pinned was the newest version, or allowed, at that time."""
    for judged in catalog.signature_checks(region, catalog.models[digest], verify):
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
                            f"one of {some_names(name, sorted(keys))}" if keys else "a declared key; there is none yet",
                            "declare it under spec.keys of the Region, with this document or before it",
                        ),
                    )
