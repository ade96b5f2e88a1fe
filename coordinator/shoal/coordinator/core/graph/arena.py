"""The memory that the runtime takes blocks from.

Source: ONNX Runtime 1.32, core/framework/bfc_arena.cc and bfc_arena.h.
"""

from bisect import bisect_left, insort
from typing import Final, NamedTuple

_ALIGNMENT: Final = 256
_FIRST_REGION: Final = 2**20
"""Bytes of the first region; each further one is twice as large, or the next power of two that holds the block."""


class _Chunk(NamedTuple):
    """A part of a region, used or free."""

    end: int
    # Number of its region: chunks of two regions are never joined.
    region: int
    is_free: bool


class Arena:
    """Blocks of memory by best fit in regions that double, as ONNX Runtime keeps them for its processor provider."""

    def __init__(self) -> None:
        self._chunks = dict[int, _Chunk]()
        # By end: start of each chunk.
        self._starts = dict[int, int]()
        # (size, start) of the free chunks, in order.
        self._free: list[tuple[int, int]] = []
        # By region: where it starts, and the end of what was ever used of it.
        self._regions: list[tuple[int, int]] = []
        self._next_region = _FIRST_REGION
        self._end = 0

    @property
    def touched_bytes(self) -> int:
        """Memory that has been used, which a process keeps resident."""
        return sum(end - start for start, end in self._regions)

    def allocate(self, size: int) -> int:
        """A block of at least `size` bytes; its address is what `free` takes."""
        size = max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT
        at = bisect_left(self._free, (size, -1))
        start = self._free.pop(at)[1] if at < len(self._free) else self._extend(size)
        end, region, _ = self._chunks[start]
        if end - start >= 2 * size:  # a smaller rest stays a part of the block
            self._put(start + size, end, region, is_free=True)
            end = start + size
        self._put(start, end, region, is_free=False)
        first, used = self._regions[region]
        if start + size > used:
            self._regions[region] = first, start + size
        return start

    def free(self, start: int) -> None:
        end, region, _ = self._chunks[start]
        after = self._chunks.get(end)
        if after is not None and after.is_free and after.region == region:
            self._take(end)
            end = after.end
        before = self._starts.get(start)
        if before is not None and (found := self._chunks[before]).is_free and found.region == region:
            self._take(before)
            del self._chunks[start]
            start = before
        self._put(start, end, region, is_free=True)

    def _extend(self, size: int) -> int:
        is_larger = size > self._next_region
        while size > self._next_region:
            self._next_region *= 2
        start = self._end
        self._end += self._next_region
        self._chunks[start] = _Chunk(self._end, len(self._regions), True)
        self._regions.append((start, start))
        if not is_larger:
            self._next_region *= 2
        return start

    def _put(self, start: int, end: int, region: int, *, is_free: bool) -> None:
        self._chunks[start] = _Chunk(end, region, is_free)
        self._starts[end] = start
        if is_free:
            insort(self._free, (end - start, start))

    def _take(self, start: int) -> None:
        """Removes a free chunk."""
        chunk = self._chunks.pop(start)
        self._free.pop(bisect_left(self._free, (chunk.end - start, start)))
