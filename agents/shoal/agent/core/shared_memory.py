"""System shared memory of Triton's extension: which tenant may register which file, and where a tensor lies in it.

Files are opened, read and written by `dataplane.shared_regions`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Generic, TypeVar

from shoal.types.codes import Code, Refusal

MAX_REGIONS: Final = 256
"""Regions of all tenants at one front; each holds a file descriptor."""
REGIONS_PER_TENANT: Final = 64
MAX_REGION_NAME: Final = 256
"""Characters of a region's name."""
MAX_KEY: Final = 255
"""Characters of a file's name: Linux' NAME_MAX."""
PREFIX: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_KEY: Final = re.compile(f"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_KEY - 1}}}")
"""One component of a path that does not begin with a dot."""
_SEMAPHORE: Final = "sem."
"""What the files of POSIX semaphores in the same folder begin with (glibc)."""
_OPTION: Final = "--shared-memory TENANT=PREFIX of shoal-agent run"


@dataclass(frozen=True, slots=True)
class SharedMemoryGrant:
    """What one tenant may register."""

    tenant: str
    # What the names of its files in /dev/shm begin with.
    prefix: str


def check_grants(grants: Iterable[SharedMemoryGrant]) -> Refusal | None:
    """Why these grants must not stand together: a prefix that is none, or a file that two tenants may register."""
    known = tuple(grants)
    for each in known:
        if PREFIX.fullmatch(each.prefix) is None:
            asked = "1 to 128 letters, digits, '.', '_' and '-', not a dot first"
            return Refusal(Code.FIELD_INVALID, f"prefix {each.prefix!r:.80}", asked, "choose another")
    for one, other in combinations(known, 2):
        shared = one.prefix.startswith(other.prefix) or other.prefix.startswith(one.prefix)
        if shared and one.tenant != other.tenant:
            found = f"prefixes {one.prefix!r} and {other.prefix!r} of two tenants"
            return Refusal(Code.FIELD_INVALID, found, "none that begins with the other", "choose another")
    return None


def file_of(key: str, tenant: str, grants: Iterable[SharedMemoryGrant]) -> str | Refusal:
    """The name in /dev/shm of the file that `key` names, if the tenant may register it. As for `shm_open`, one slash
    may come first."""
    prefixes = tuple(each.prefix for each in grants if each.tenant == tenant)
    if not prefixes:
        return shm_refusal("shared memory of this tenant at this front", "a front that allows it", f"ask for {_OPTION}")
    file = key.removeprefix("/")
    if _KEY.fullmatch(file) is None or file.startswith(_SEMAPHORE) or not file.startswith(prefixes):
        allowed = " or ".join(repr(each) for each in prefixes)
        return shm_refusal(f"key {key!r:.80}", f"the name of a region that begins with {allowed}", "choose another key")
    return file


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """A part of a file that a tenant registered."""

    # As the tenant named it.
    name: str
    # As the tenant gave it.
    key: str
    # Where in the file it begins, bytes.
    offset: int
    # Bytes of it.
    size: int

    def locate(self, offset: int, size: int) -> int | Refusal:
        """Where in the file `size` bytes begin that lie at `offset` of the region."""
        if not (0 <= offset <= self.size and 0 <= size <= self.size - offset):
            return shm_refusal(
                f"{size} bytes at {offset} of shared memory region {self.name!r:.80}",
                f"what lies inside its {self.size} bytes",
                "see its status",
            )
        return self.offset + offset

    def check(self, file_bytes: int) -> Refusal | None:
        """Why this is no part of a file of that size."""
        if self.size < 1 or self.offset < 0 or self.offset > file_bytes or self.size > file_bytes - self.offset:
            return shm_refusal(
                f"{self.size} bytes at {self.offset} of a file of {file_bytes}",
                "one byte or more, inside the file",
                "create the region before it is registered, as large as it is registered",
            )
        return None


_R = TypeVar("_R")


class RegionTable(Generic[_R]):
    """The regions of one front, by tenant and name. Nothing that it says of one tenant depends on another's, but for
    the limit of all.

    A region that is removed while a request uses it takes a place until `release`.
    """

    def __init__(self) -> None:
        self._by_tenant: defaultdict[str, dict[str, _R]] = defaultdict(dict)
        self._places: Counter[str] = Counter()

    def of(self, tenant: str) -> Mapping[str, _R]:
        """The tenant's regions by name."""
        return self._by_tenant.get(tenant, {})

    def find(self, tenant: str, name: str) -> _R | Refusal:
        found = self.of(tenant).get(name)
        if found is None:
            return Refusal(
                Code.NOT_FOUND,
                f"shared memory region {name!r:.80}",
                "one that this tenant registered at this front",
                "register it",
            )
        return found

    def check_new(self, tenant: str, name: str) -> Refusal | None:
        """Why the tenant cannot register a region of that name."""
        if not 0 < len(name) <= MAX_REGION_NAME:
            asked = f"1 to {MAX_REGION_NAME}"
            return Refusal(Code.INVALID_ARGUMENT, f"a region's name of {len(name)} characters", asked, "choose another")
        if name in self.of(tenant):
            return Refusal(Code.CONFLICT, f"shared memory region {name!r:.80}", "a new name", "unregister it first")
        if self._places[tenant] >= REGIONS_PER_TENANT or self._places.total() >= MAX_REGIONS:
            return shm_refusal(
                f"{self._places[tenant]} regions of this tenant, and as many as {MAX_REGIONS} of all",
                f"at most {REGIONS_PER_TENANT} and {MAX_REGIONS}",
                "unregister some, or register larger ones",
            )
        return None

    def add(self, tenant: str, name: str, region: _R) -> None:
        """Add what `check_new` accepts."""
        self._by_tenant[tenant][name] = region
        self._places[tenant] += 1

    def remove(self, tenant: str, name: str = "") -> tuple[_R, ...]:
        """Remove one region, or all of the tenant where `name` is empty. What does not exist is not missed."""
        known = self._by_tenant.get(tenant, {})
        names = tuple(known) if not name else (name,) if name in known else ()
        removed = tuple(known.pop(each) for each in names)
        if not known:
            self._by_tenant.pop(tenant, None)
        return removed

    def release(self, tenant: str) -> None:
        """Free the place of a removed region."""
        self._places[tenant] -= 1
        if not self._places[tenant]:
            del self._places[tenant]


def shm_refusal(found: str, asked: str, remedy: str) -> Refusal:
    return Refusal(Code.SHM_DENIED, found, asked, remedy)
