"""A backup's file: what it holds comes back, and a file that is not whole is never taken for one."""

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from shoal.artifacts import backup
from shoal.artifacts.backup import KEYS, MANIFEST, SUMS, Backup, BackupWriter, Manifest, read_secret
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Wall

SECRET = b"a secret of enough bytes"
RECORDS = {"audit/1": b"{}", "nodes/a": bytes(range(256)) * 40, "region": b'{"name": "eu"}'}
KEYRING = {"cert.pem": b"PUBLIC", "key.pem": b"PRIVATE", "2/key.pem": b"NEXT"}
MODEL = b"onnx" * 1000


def write_backup(
    path: Path, records: Mapping[str, bytes] = RECORDS, secret: bytes = SECRET, model: bytes = MODEL
) -> Backup:
    digest = f"sha256:{hashlib.sha256(model).hexdigest()}"
    models = {digest: len(model)} if model else {}
    manifest = Manifest("region", "eu", "sqlite", 7, Wall(1e9), "0.1", len(records), models, keys=bool(secret))
    writer = BackupWriter(manifest)
    pieces = [writer.head(), *writer.records(records.items())]
    if secret:
        pieces.append(writer.keys(KEYRING, secret))
    if model:
        pieces += [writer.model_head(digest), model, writer.padding(len(model))]
    path.write_bytes(b"".join([*pieces, writer.tail()]))
    return Backup.open(path)


def members_of(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as file:
        return {each.name: file.extractfile(each).read() for each in file}  # type: ignore[union-attr]


def pack_tar(path: Path, members: Mapping[str, bytes], *, sums: bool = False) -> None:
    """sums: made anew, as one would who means to deceive."""
    if sums:
        rest = {name: content for name, content in members.items() if name != SUMS}
        told = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in rest.items())
        members = {**rest, SUMS: told.encode()}
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))


def refusal_code(path: Path) -> Code:
    with pytest.raises(ShoalError) as error:
        Backup.open(path)
    return error.value.code


def test_what_was_written_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "PART_BYTES", 4000)
    found = write_backup(tmp_path / "b.tar")
    assert dict(found.records()) == RECORDS
    assert found.keys(SECRET) == KEYRING
    (digest,) = found.manifest.models
    assert b"".join(found.model(digest, 999)) == MODEL
    assert sum(name.startswith("records-") for name in found.digests) == 3, "a part for each that is large"


def test_ordinary_tools_read_and_verify_it(tmp_path: Path) -> None:
    write_backup(tmp_path / "b.tar")
    subprocess.run(["tar", "-xf", "b.tar"], cwd=tmp_path, check=True)
    done = subprocess.run(["sha256sum", "--check", SUMS], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert b"PRIVATE" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_file_that_was_cut_off_anywhere_is_found(tmp_path: Path) -> None:
    write_backup(tmp_path / "b.tar")
    whole, cut = (tmp_path / "b.tar").read_bytes(), tmp_path / "cut.tar"
    content = len(whole.rstrip(b"\0"))
    for size in (0, 1, 511, 512, 513, *range(600, content, 701), content - 1):
        cut.write_bytes(whole[:size])
        assert refusal_code(cut) is Code.STATE_CORRUPT, size


def test_a_changed_byte_of_any_member_is_found(tmp_path: Path) -> None:
    write_backup(tmp_path / "b.tar")
    members, changed = members_of(tmp_path / "b.tar"), tmp_path / "changed.tar"
    for name, content in members.items():
        for at in {0, len(content) // 2, len(content) - 1}:
            flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
            pack_tar(changed, {**members, name: flipped})
            assert refusal_code(changed) in (Code.STATE_CORRUPT, Code.NOT_SUPPORTED_YET), (name, at)


@pytest.mark.parametrize("name", [MANIFEST, "records-00000.jsonl.gz", KEYS, SUMS])
def test_a_member_that_is_gone_or_strange_is_found(tmp_path: Path, name: str) -> None:
    write_backup(tmp_path / "b.tar")
    members = members_of(tmp_path / "b.tar")
    pack_tar(
        tmp_path / "less.tar", {each: content for each, content in members.items() if each != name}, sums=name != SUMS
    )
    assert refusal_code(tmp_path / "less.tar") is Code.STATE_CORRUPT
    pack_tar(tmp_path / "more.tar", {**members, "../evil": b""}, sums=True)
    assert refusal_code(tmp_path / "more.tar") is Code.STATE_CORRUPT


def test_keys_open_with_their_secret_and_beside_their_own_state_alone(tmp_path: Path) -> None:
    found = write_backup(tmp_path / "b.tar")
    with pytest.raises(ShoalError) as wrong:
        found.keys(SECRET + b"!")
    assert wrong.value.code is Code.UNAUTHENTICATED
    members = members_of(tmp_path / "b.tar")
    lines = gzip.decompress(members["records-00000.jsonl.gz"]).replace(b"nodes/a", b"nodes/b")
    pack_tar(tmp_path / "other.tar", {**members, "records-00000.jsonl.gz": gzip.compress(lines)}, sums=True)
    other = Backup.open(tmp_path / "other.tar")
    with pytest.raises(ShoalError) as tampered:
        other.keys(SECRET)
    assert tampered.value.code is Code.UNAUTHENTICATED


def test_a_later_format_says_which_version_made_it(tmp_path: Path) -> None:
    write_backup(tmp_path / "b.tar")
    members = members_of(tmp_path / "b.tar")
    said = json.loads(members[MANIFEST])
    pack_tar(tmp_path / "new.tar", {**members, MANIFEST: json.dumps({**said, "format": 2}).encode()}, sums=True)
    assert refusal_code(tmp_path / "new.tar") is Code.NOT_SUPPORTED_YET


def test_records_that_would_grow_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_backup(tmp_path / "b.tar")
    members = members_of(tmp_path / "b.tar")
    monkeypatch.setattr(backup, "MEMBER_BYTES", 100_000)
    pack_tar(tmp_path / "bomb.tar", {**members, "records-00000.jsonl.gz": gzip.compress(bytes(10**7))}, sums=True)
    assert refusal_code(tmp_path / "bomb.tar") is Code.STATE_CORRUPT


def test_a_secret_is_long_enough_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    assert read_secret(path) == SECRET
    path.chmod(0o640)
    short = tmp_path / "short"
    short.touch(0o600)
    short.write_bytes(b"short")
    for wrong in (path, short, tmp_path / "gone"):
        with pytest.raises(ShoalError) as error:
            read_secret(wrong)
        assert error.value.code is Code.FIELD_INVALID
