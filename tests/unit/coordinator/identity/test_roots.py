"""The CA's files: whatever is done to them, and wherever it is cut off, a start finds one CA that issues."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.identity import roots as module
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.roots import Roots
from shoal.host.private_files import write_private
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.wire.trust import authority_fingerprints, bundle_of_authorities

WALL = Wall(1_800_000_000.0)
NEXT = {"idle": "begin", "trust": "promote", "issue": "retire"}
STAGES = ("idle", "trust", "issue")


class PowerCut(Exception):
    pass


@contextmanager
def cut_after(writes: int) -> Iterator[None]:
    """The machine goes down before the write of that number, from 0."""
    left = writes

    def write(*arguments: Any) -> None:
        nonlocal left
        if left == 0:
            raise PowerCut
        left -= 1
        write_private(*arguments)

    with mock.patch.object(module, "write_private", write):
        yield


def open_roots(folder: Path) -> Roots:
    return Roots.open(folder, "eu", wall=WALL, may_create=True)


def is_sound(found: Roots) -> None:
    assert found.stage in STAGES
    assert found.issuing_name in found.trusted_names
    assert found.issuing.key is not None, "it can issue"
    assert all(root.key is not None for root in found.trusted_roots)
    oldest = min(int(name) for name in found.trusted_names)
    places = {root.name: found.folder if root.name == "1" else found.folder / root.name for root in found.all_roots}
    kept = [name for name, place in places.items() if int(name) < oldest and (place / "key.pem").exists()]
    assert not kept, "a retired CA's key is gone"
    assert all(place.joinpath("key.pem").stat().st_mode & 0o077 == 0 for name, place in places.items()
               if name in found.trusted_names)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=1, max_size=9))
def test_a_rotation_that_is_cut_off_anywhere_goes_on_where_it_stood(cuts: list[int | None]) -> None:
    """cuts: of each step, the write before which the power goes; None: it is not cut."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = open_roots(folder)
        for cut in cuts:
            before = found
            try:
                with cut_after(-1 if cut is None else cut):
                    getattr(found, NEXT[found.stage])(WALL)
                done = True
            except PowerCut:
                done = False
            found = open_roots(folder)
            is_sound(found)
            following = STAGES[(STAGES.index(before.stage) + 1) % 3]
            assert found.stage == (following if done else before.stage)
            assert {root.fingerprint for root in before.all_roots} <= {root.fingerprint for root in found.all_roots}
            if not done:
                assert found.issuing.fingerprint == before.issuing.fingerprint


def test_a_start_that_was_cut_off_makes_the_first_ca_anew(tmp_path: Path) -> None:
    with pytest.raises(PowerCut), cut_after(1):
        open_roots(tmp_path)
    assert (tmp_path / "key.pem").exists()
    is_sound(open_roots(tmp_path))


@pytest.mark.parametrize("step", ["begin", "promote", "retire"])
def test_a_process_that_does_not_know_of_anothers_change_changes_nothing(tmp_path: Path, step: str) -> None:
    """It was paused, or the election of replicas was lost while a slow disk wrote."""
    stale = open_roots(tmp_path)
    for each in ("begin", "promote", "retire"):
        if each == step:
            break
        stale = getattr(stale, each)(WALL)
    newest = getattr(open_roots(tmp_path), step)(WALL)
    with pytest.raises(ShoalError) as error:
        getattr(stale, step)(WALL)
    assert error.value.code is Code.CONFLICT
    found = open_roots(tmp_path)
    is_sound(found)
    assert (found.stage, found.trusted_names, found.since) == (newest.stage, newest.trusted_names, newest.since)
    assert [each.fingerprint for each in found.all_roots] == [each.fingerprint for each in newest.all_roots]
    assert stale.reload().stage == newest.stage


def test_each_ca_and_those_of_a_rotation_are_what_other_regions_take(tmp_path: Path) -> None:
    authority = FileAuthority(open_roots(tmp_path))
    for step in ("begin", "promote", "retire", "begin"):
        authority._roots = getattr(authority._roots, step)(WALL)
        assert authority_fingerprints(authority.roots, "eu") == authority.fingerprints
        cross = [each.cross_pem.decode() for each in authority._roots.all_roots if each.cross_pem]
        assert len(authority_fingerprints(cross, "eu")) == len(cross) > 0
        joined = bundle_of_authorities(("eu", pem) for pem in (*authority.roots, *cross))
        assert joined == "".join((*authority.roots, *cross))
        with pytest.raises(ShoalError):
            authority_fingerprints(authority.roots, "us")


def test_a_key_that_retirement_left_behind_is_gone_at_the_next_start(tmp_path: Path) -> None:
    found = open_roots(tmp_path).begin(WALL).promote(WALL)
    with mock.patch.object(module, "_forget"):
        found.retire(WALL)
    assert (tmp_path / "key.pem").exists(), "it was cut off right there"
    is_sound(open_roots(tmp_path))
    assert not (tmp_path / "key.pem").exists()


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4))
def test_who_trusts_only_the_ca_before_believes_what_the_next_one_issues(turns: int) -> None:
    """While both are trusted: the successor's certificate as its predecessor signed it closes the chain."""
    with tempfile.TemporaryDirectory() as name:
        authority = FileAuthority(open_roots(Path(name)))
        certificates = []
        for _ in range(turns):
            old = authority._roots.issuing.certificate
            authority._roots = authority._roots.begin(WALL).promote(WALL)
            issued = authority.enrol_self(Role.AGENT, "n", lifetime_s=Seconds(60.0), wall=WALL)
            leaf, cross = x509.load_pem_x509_certificates(issued.certificate_pem)
            leaf.verify_directly_issued_by(cross)
            cross.verify_directly_issued_by(old)
            assert authority.fingerprints[0] == authority.fingerprint
            assert authority.recognise(issued.certificate_pem).issuer == authority.fingerprint
            authority._roots = authority._roots.retire(WALL)
            assert len(x509.load_pem_x509_certificates(authority.ca_pem)) == 1
            certificates.append(issued.certificate_pem)
        for earlier, _ in pairwise(certificates):
            with pytest.raises(ShoalError) as error:
                authority.recognise(earlier)
            assert error.value.code is Code.CERT_UNTRUSTED
            assert authority.recognise(earlier, retired=True), "who was away may still renew"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "cert.pem").write_bytes(b"x"),
        lambda folder: (folder / "key.pem").unlink(),
        lambda folder: (folder / "key.pem").write_bytes((folder / "2" / "key.pem").read_bytes()),
        lambda folder: (folder / "rotation.json").write_text('{"issuing": "7", "trusted": ["7"], "since": 0}'),
        lambda folder: (folder / "rotation.json").write_text("{"),
        lambda folder: (folder / "2" / "cert.pem").unlink(),
    ],
)
def test_files_that_do_not_belong_together_are_said_and_nothing_is_made_anew(tmp_path: Path, damage: Any) -> None:
    open_roots(tmp_path).begin(WALL)
    damage(tmp_path)
    with pytest.raises(ShoalError) as error:
        Roots.open(tmp_path, "eu", wall=WALL, may_create=False)
    assert error.value.code is Code.STATE_CORRUPT
    assert error.value.refusal.remedy


def test_a_known_region_without_its_ca_makes_no_other(tmp_path: Path) -> None:
    with pytest.raises(ShoalError) as error:
        Roots.open(tmp_path, "eu", wall=WALL, may_create=False)
    assert error.value.code is Code.STATE_CORRUPT
    open_roots(tmp_path)
    with pytest.raises(ShoalError) as error:
        Roots.open(tmp_path, "us", wall=WALL, may_create=True)
    assert error.value.code is Code.STATE_CORRUPT
