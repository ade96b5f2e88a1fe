"""A context's files, read while they are replaced one after the other."""

import itertools
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.crypto.pki import Authority
from harness.servers.api_stub import ApiStub, api_stubs
from shoal.client import Context, InferenceClient, RegionClient, pem_files
from shoal.client.pem_files import WHOLE_WITHIN_S, read_pem_files
from shoal.coordinator.clock import CoordinatorClock
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role

FILES: tuple[str, ...] = ("ca.pem", "key.pem", "cert.pem")
"""In the order in which they are replaced."""


class Writer:
    """Stands in for the module `time`, and for whoever replaces the files: goes on where the reader waits."""

    def __init__(self, folder: Path, contents: tuple[bytes, ...]) -> None:
        self.now = 0.0
        self.is_stuck = False
        self._folder = folder
        self._contents = dict(zip(FILES, contents, strict=True))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if not self.is_stuck:
            self.write(FILES)

    def write(self, names: tuple[str, ...]) -> None:
        for name in names:
            (self._folder / name).write_bytes(self._contents[name])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki", "eu", CoordinatorClock().wall())


@pytest.fixture
def stubs(authority: Authority, tmp_path: Path) -> Iterator[list[ApiStub]]:
    """Coordinators that take an operator's files, which are in `ann`."""
    with api_stubs(authority, tmp_path / "ann") as found:
        yield found


@pytest.fixture
def context(stubs: list[ApiStub], tmp_path: Path) -> Context:
    """Knows the leader alone."""
    return Context("eu", "eu", stubs[1].address, str(tmp_path / "ann"), "127.0.0.1:1")


@pytest.fixture
def fresh(authority: Authority) -> tuple[bytes, bytes, bytes]:
    """What the operator's files are replaced by, in the order of `FILES`."""
    certificate, key, ca = authority.issue(Role.OPERATOR, "ann").read()
    return ca + b"\n", key, certificate


@pytest.fixture
def writer(context: Context, fresh: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch) -> Writer:
    found = Writer(Path(context.folder), fresh)
    monkeypatch.setattr(pem_files, "time", found)
    return found


def test_a_command_amid_the_renewal_of_its_files_waits_for_the_rest_of_them(
    context: Context, writer: Writer, fresh: tuple[bytes, ...]
) -> None:
    writer.write(FILES[:2])
    with RegionClient(context) as api:
        assert not api.who_am_i().follows, "one address alone: nothing would call again"
    assert writer.now > 0.0, "it was read amid the renewal"
    assert read_pem_files(context) == fresh


def test_a_request_amid_the_renewal_of_its_files_waits_for_the_rest_of_them(context: Context, writer: Writer) -> None:
    writer.write(FILES[:2])
    InferenceClient(context).close()
    assert writer.now > 0.0, "it was read amid the renewal"


@pytest.mark.parametrize("unchanged", range(3))
def test_files_that_are_replaced_between_two_readings_are_read_again(
    context: Context, writer: Writer, fresh: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch, unchanged: int
) -> None:
    """What is there afterwards is a pair. unchanged: files that are read before."""
    read, count = Path.read_bytes, itertools.count()

    def replace_then_read(path: Path) -> bytes:
        if path.name in FILES and next(count) == unchanged:
            writer.write(FILES)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", replace_then_read)
    assert read_pem_files(context) == fresh


def test_files_that_stay_a_mixture_are_told_of_as_before(context: Context, writer: Writer) -> None:
    writer.is_stuck = True
    writer.write(FILES[:2])
    with RegionClient(context) as api, pytest.raises(ShoalError) as refused:
        api.who_am_i()
    assert refused.value.code is Code.CERT_NAME_INVALID
    assert WHOLE_WITHIN_S <= writer.now < 2 * WHOLE_WITHIN_S
    with pytest.raises(ssl.SSLError, match="key values mismatch"):
        InferenceClient(context)


@pytest.mark.parametrize("name", FILES)
def test_what_cannot_be_read_is_not_waited_for(context: Context, writer: Writer, name: str) -> None:
    (Path(context.folder) / name).unlink()
    with pytest.raises(ShoalError) as refused:
        RegionClient(context)
    assert refused.value.code is Code.UNAUTHENTICATED
    assert name in refused.value.refusal.found
    (Path(context.folder) / name).write_bytes(b"no PEM")
    assert read_pem_files(context)[FILES.index(name)] == b"no PEM"
    assert writer.now == 0.0
