"""What one run takes of the runtime's arena."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from harness.models.synthetic import digest_of, model, tensor
from shoal.coordinator.core.graph import profile_of
from shoal.coordinator.core.graph.arena import Arena
from shoal.types.profile import ModelProfile

MIB, KIB = 2**20, 2**10


def test_a_block_is_the_smallest_that_fits_and_is_split_from_twice_its_size_on() -> None:
    arena = Arena()
    large, between, small, _ = (arena.allocate(size) for size in (300 * KIB, KIB, 150 * KIB, KIB))
    arena.free(large)
    arena.free(small)
    assert arena.allocate(149 * KIB) == small
    assert arena.allocate(100 * KIB) == large
    assert arena.allocate(199 * KIB) == large + 100 * KIB
    assert between == large + 300 * KIB


def test_regions_double_and_hold_the_largest_block() -> None:
    """1 MiB, 2 MiB, then 16 MiB for a block of 9 MiB; only what is used of them counts."""
    arena = Arena()
    for size in (MIB, MIB, MIB, 9 * MIB):
        arena.allocate(size)
    assert arena.touched_bytes == 12 * MIB
    second = Arena()
    for _ in range(4):
        second.free(second.allocate(MIB))
    assert second.touched_bytes == MIB


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3 * MIB), st.integers(0, 30)), min_size=1, max_size=60))
def test_blocks_never_overlap_and_what_is_freed_is_used_again(steps: list[tuple[int, int]]) -> None:
    arena, live, most = Arena(), list[tuple[int, int]](), 0
    for size, drop in steps:
        if drop < len(live):
            arena.free(live.pop(drop)[0])
        live.append((arena.allocate(size), size))
        most = max(most, sum(each for _, each in live))
        for (start, held), (after, _) in pairwise(sorted(live)):
            assert start + held <= after
    assert arena.touched_bytes >= most
    for start, _ in live:
        arena.free(start)
    before = arena.touched_bytes
    arena.allocate(256)
    assert arena.touched_bytes == before


def profile(content: bytes) -> ModelProfile:
    found = profile_of(content, digest_of(content))
    assert isinstance(found, ModelProfile), found
    return found


def test_growing_concatenations_leave_gaps_that_live_tensors_do_not_have() -> None:
    """Each result is larger than all that was freed before it, as in a DenseNet."""
    nodes = [helper.make_node("Concat", ["x" if i == 0 else f"c{i}", "x"], [f"c{i + 1}"], axis=1) for i in range(12)]
    made = model(nodes, [tensor("x", [1, 64, 1024])], [tensor("c12", None)])
    found = profile(made.SerializeToString())
    assert found.run_bytes > 1.4 * found.activation_bytes
