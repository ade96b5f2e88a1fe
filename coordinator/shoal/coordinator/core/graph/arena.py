"""What one run takes of the runtime's memory: the blocks that its tensors get, in the order of the nodes.

Source: ONNX Runtime 1.32, core/framework/bfc_arena.cc and bfc_arena.h for the arena, `MayInplace` of the kernels in
core/providers/cpu for what is computed in place. Its memory pattern, which would take one more block of all tensors, is
turned off where workers open models.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from onnx import NodeProto

from shoal.coordinator.core.graph.contents import domain_of, input_names
from shoal.coordinator.core.graph.flops import VIEWS

_ALIGNMENT: Final = 256
_FIRST_REGION: Final = 2**20
"""Bytes of the first region; each further one is twice as large, or the next power of two that holds the block."""
_IN_PLACE: Final = frozenset(
    {
        "Abs", "Add", "Ceil", "Clip", "Div", "Elu", "Exp", "Floor", "HardSigmoid", "LeakyRelu", "Log", "Mul", "Neg",
        "Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Sqrt", "Sub", "Tanh", "ThresholdedRelu",
    }
)  # fmt: skip


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
        chunk = self._chunks[start]
        if chunk.end - start >= 2 * size:  # a smaller rest stays a part of the block
            self._put(start + size, chunk)
            chunk = chunk._replace(end=start + size)
        self._put(start, chunk._replace(is_free=False))
        first, used = self._regions[chunk.region]
        self._regions[chunk.region] = first, max(used, start + size)
        return start

    def free(self, start: int) -> None:
        chunk = self._chunks[start]
        after = self._chunks.get(chunk.end)
        if after is not None and after.is_free and after.region == chunk.region:
            self._take(chunk.end)
            chunk = chunk._replace(end=after.end)
        before = self._starts.get(start)
        if before is not None and (found := self._chunks[before]).is_free and found.region == chunk.region:
            self._take(before)
            del self._chunks[start]
            start = before
        self._put(start, chunk._replace(is_free=True))

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

    def _put(self, start: int, chunk: _Chunk) -> None:
        self._chunks[start] = chunk
        self._starts[chunk.end] = start
        if chunk.is_free:
            insort(self._free, (chunk.end - start, start))

    def _take(self, start: int) -> None:
        """Removes a free chunk."""
        chunk = self._chunks.pop(start)
        self._free.pop(bisect_left(self._free, (chunk.end - start, start)))


class RunMemory:
    """The arena during one run. A tensor has a block from the node that makes it to the last one that reads it; results
    keep theirs. A view, what a kernel computes in place, and what it absorbs share the block of their input. What the
    caller holds, inputs and weights, has no block, nor has a view of it that is no result."""

    def __init__(self, nodes: Sequence[NodeProto], results: Iterable[str]) -> None:
        self._arena = Arena()
        self._results = frozenset(results)
        # By tensor: nodes that are still to read it, and one more for a result.
        self._readers = Counter(name for node in nodes for name in set(input_names(node)))
        self._readers.update(self._results)
        # By tensor: its block.
        self._blocks = dict[str, int]()
        # By tensor with a block of its own: bytes.
        self._sizes = dict[str, int]()
        # By block: tensors that are in it.
        self._holders = Counter[int]()

    @property
    def touched_bytes(self) -> int:
        return self._arena.touched_bytes

    def run(self, node: NodeProto, made: Collection[tuple[str, int]], inner_bytes: int, *, is_absorbed: bool) -> None:
        """made: outputs that are no constants, with their bytes. inner_bytes: of the graphs inside the node."""
        read = set(input_names(node))
        for number, (name, size) in enumerate(made):
            if self._readers[name] == 0:
                continue  # the runtime makes no output that nothing reads
            if not number and _is_view(node) and node.input[0] not in self._blocks and name not in self._results:
                continue
            block = None if number else self._shared_block(node, size, is_absorbed=is_absorbed)
            self._blocks[name] = block = self._arena.allocate(size) if block is None else block
            self._sizes[name] = size
            self._holders[block] += 1
        if inner_bytes:
            self._arena.free(self._arena.allocate(inner_bytes))
        for name in read:
            self._readers[name] -= 1
            if self._readers[name] == 0 and name in self._blocks:
                self._release(name)

    def _shared_block(self, node: NodeProto, size: int, *, is_absorbed: bool) -> int | None:
        """That of an input which the node's first output shares."""
        if _is_view(node):
            return self._blocks.get(node.input[0])
        if not is_absorbed and (domain_of(node) or node.op_type not in _IN_PLACE):
            return None
        for name in node.input:
            block = self._blocks.get(name)
            is_last = self._readers[name] == 1 and block is not None and self._holders[block] == 1
            if is_last and self._sizes[name] == size:
                return block
        return None

    def _release(self, name: str) -> None:
        block = self._blocks.pop(name)
        del self._sizes[name]
        self._holders[block] -= 1
        if self._holders[block] == 0:
            del self._holders[block]
            self._arena.free(block)


def _is_view(node: NodeProto) -> bool:
    return not domain_of(node) and node.op_type in VIEWS and bool(node.input)
