"""Who may register which file, and where tensors lie in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.core.shared_memory import (
    MAX_REGION_NAME,
    MAX_REGIONS,
    REGIONS_PER_TENANT,
    RegionTable,
    SharedMemoryGrant,
    SharedRegion,
    check_grants,
    file_of,
)
from shoal.types.codes import Code, Refusal

GRANTS = (SharedMemoryGrant("acme", "acme-"), SharedMemoryGrant("acme", "a2"), SharedMemoryGrant("shop", "shop-"))
NUMBER = st.integers(-(2**70), 2**70) | st.integers(-4, 80)
"""Whatever a message or a JSON document can say, and what is near the bounds."""


def code_of(found: object) -> Code | None:
    return found.code if isinstance(found, Refusal) else None


@given(region=st.tuples(NUMBER, NUMBER), file_bytes=st.integers(0, 80), asked=st.tuples(NUMBER, NUMBER))
def test_a44_what_is_accepted_lies_inside_the_region_and_the_file(
    region: tuple[int, int], file_bytes: int, asked: tuple[int, int]
) -> None:
    found = SharedRegion("r", "acme-r", *region)
    offset, size = asked
    if found.check(file_bytes) is not None:
        assert code_of(found.check(file_bytes)) is Code.SHM_DENIED
        assert found.size < 1 or found.offset < 0 or found.offset + found.size > file_bytes
        return
    position = found.locate(offset, size)
    if isinstance(position, Refusal):
        assert position.code is Code.SHM_DENIED
        assert offset < 0 or size < 0 or offset + size > found.size
        return
    assert 0 <= found.offset <= position <= position + size <= found.offset + found.size <= file_bytes
    assert set(range(position, position + size)) <= set(range(file_bytes))


@given(st.text(max_size=300) | st.from_regex(r"/?(acme-|a2|shop-|sem\.)?[./a-z-]*", fullmatch=True))
def test_a44_a_key_is_one_plain_name_that_begins_with_the_tenants_prefix(key: str) -> None:
    file = file_of(key, "acme", GRANTS)
    if isinstance(file, Refusal):
        assert file.code is Code.SHM_DENIED
        assert "shop" not in str(file).replace(repr(key), "")
        return
    assert key in (file, f"/{file}")
    assert file.startswith(("acme-", "a2"))
    assert "/" not in file
    assert len(file.encode()) <= 255


@pytest.mark.parametrize(
    "key",
    [
        "", "/", ".", "..", "../acme-x", "/../acme-x", "//acme-x", "acme-/x", "acme-x/..", "acme-\0", "acme-x\n",
        "/dev/shm/acme-x", "shop-x", "psm_12345678", "sem.acme-x", "ACME-x", "acme-" + "x" * 251, "acme-é",
    ],
)  # fmt: skip
def test_a44_these_keys_are_refused(key: str) -> None:
    assert code_of(file_of(key, "acme", GRANTS)) is Code.SHM_DENIED


def test_a_key_may_begin_with_a_slash_as_for_shm_open() -> None:
    assert file_of("/acme-x", "acme", GRANTS) == file_of("acme-x", "acme", GRANTS) == "acme-x"
    assert file_of("acme-" + "x" * 250, "acme", GRANTS) == "acme-" + "x" * 250


def test_a44_semaphores_are_out_of_reach_of_any_prefix() -> None:
    grants = (SharedMemoryGrant("acme", "s"),)
    assert file_of("st", "acme", grants) == "st"
    assert code_of(file_of("sem.other", "acme", grants)) is Code.SHM_DENIED


def test_a44_nobody_has_a_key_unless_allowed() -> None:
    for tenant in ("other", ""):
        assert code_of(file_of("acme-x", tenant, GRANTS)) is Code.SHM_DENIED
    assert code_of(file_of("acme-x", "acme", ())) is Code.SHM_DENIED


@pytest.mark.parametrize("prefix", ["", ".", "..", ".acme", "a/", "/a", "a b", "a\n", "é", "a" * 129])
def test_a44_a_prefix_is_plain(prefix: str) -> None:
    assert code_of(check_grants((SharedMemoryGrant("acme", prefix),))) is Code.FIELD_INVALID


def test_a44_no_file_is_two_tenants() -> None:
    assert check_grants(GRANTS) is None
    assert check_grants(()) is None
    for prefix in ("acme-", "acme-2", "a", "ac"):
        assert code_of(check_grants((*GRANTS, SharedMemoryGrant("other", prefix)))) is Code.FIELD_INVALID
    assert check_grants((*GRANTS, SharedMemoryGrant("acme", "acme-2"))) is None


def test_a44_a_tenants_names_are_its_own() -> None:
    table: RegionTable[str] = RegionTable()
    for tenant in ("acme", "shop"):
        assert table.check_new(tenant, "r") is None
        table.add(tenant, "r", f"{tenant}'s")
    assert (table.find("acme", "r"), table.find("shop", "r")) == ("acme's", "shop's")
    table.add("shop", "secret", "s")
    assert table.find("acme", "secret") == table.find("nobody", "secret")
    assert code_of(table.find("acme", "secret")) is Code.NOT_FOUND
    assert dict(table.of("acme")) == {"r": "acme's"}
    assert table.remove("acme", "secret") == ()
    assert table.remove("acme") == ("acme's",)
    assert table.find("shop", "r") == "shop's"
    assert set(table.of("shop")) == {"r", "secret"}


def test_a44_regions_are_counted_until_they_are_closed() -> None:
    table: RegionTable[int] = RegionTable()
    for number in range(REGIONS_PER_TENANT):
        assert table.check_new("acme", f"r{number}") is None
        table.add("acme", f"r{number}", number)
    assert code_of(table.check_new("acme", "one more")) is Code.SHM_DENIED
    assert table.check_new("shop", "r") is None
    assert len(table.remove("acme")) == REGIONS_PER_TENANT
    assert code_of(table.check_new("acme", "one more")) is Code.SHM_DENIED, "all are in use"
    table.release("acme")
    assert table.check_new("acme", "one more") is None


def test_a44_regions_of_all_are_counted() -> None:
    table: RegionTable[int] = RegionTable()
    for number in range(MAX_REGIONS):
        table.add(f"t{number // REGIONS_PER_TENANT}", f"r{number}", number)
    assert code_of(table.check_new("late", "r")) is Code.SHM_DENIED


@pytest.mark.parametrize(
    ("name", "code"),
    [("", Code.INVALID_ARGUMENT), ("n" * (MAX_REGION_NAME + 1), Code.INVALID_ARGUMENT), ("r", Code.CONFLICT)],
)
def test_a_region_has_a_name_of_its_own(name: str, code: Code) -> None:
    table: RegionTable[int] = RegionTable()
    table.add("acme", "r", 1)
    assert code_of(table.check_new("acme", name)) is code
