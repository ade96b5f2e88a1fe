"""What one run takes of the runtime's memory: which tensors share a block, and the arena that the blocks come from.

Source: ONNX Runtime 1.32, core/framework/allocation_planner.cc for what shares a block, and core/graph/graph_viewer.cc
for the order in which kernels run. Its memory pattern, which would take one more block of all tensors, is turned off
where workers open models.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from shoal.coordinator.core.graph.arena import Arena
from shoal.types.profile import RUN_BATCHES

_Shape = tuple[int, ...]


class Tensor(NamedTuple):
    """A tensor in one of its layouts."""

    name: str
    # Its channels stand in blocks (`blocked_layout`).
    is_blocked: bool = False


class Made(NamedTuple):
    """What a kernel makes."""

    tensor: Tensor
    bytes: int
    # Its shape, by which the runtime compares before a run; None: not known by then.
    shape: _Shape | None = None


class Task(NamedTuple):
    """A kernel, with the tensors that it reads and makes."""

    # Without what the caller holds: weights, and inputs of the model.
    reads: tuple[Tensor, ...]
    # Of these, those whose block the first output may take, in order of preference.
    reusable: tuple[Tensor, ...]
    # Its outputs.
    made: tuple[Made, ...]
    # What it takes while it runs, besides.
    inner_bytes: int
    # Its first output is its first input under another shape.
    is_view: bool
    # In the runtime's list of nodes. Of several tasks that one waits for, the last in the list runs first.
    place: int
    # It copies one tensor into another layout, which is no node of the model.
    is_copy: bool = False


class RunBytes(NamedTuple):
    """Memory that a run has used when it ends, which a process keeps resident."""

    # Of one request.
    one_bytes: int
    # Of each further one that runs with it, at most.
    growth_bytes: int
    # Of each of `RUN_BATCHES`.
    batch_bytes: tuple[int, ...]


NOTHING: Final = RunBytes(0, 0, ())
_RUNS: Final = 3
"""Runs after which nearly nothing is added. Of the runtime itself, while each answer is held until the next run ended,
super-resolution at batch 4 has 15.8 MiB after the first, 20.5, 21.8, and that after the tenth."""


def run_bytes(tasks: Sequence[Task], results: Iterable[Tensor]) -> RunBytes:
    """What the caller holds, inputs and weights, takes none. Regions double, so what a run takes is not in proportion
    to its requests.

    In which order the runtime lists copies out of blocks differs from load to load: it goes by the addresses of tensors
    (`nchwc_args_` of core/optimizer/nchwc_transformer.cc). Here it is that of two opposite orders that takes more.
    """
    results = tuple(results)
    orders = [execution_order(each, results) for each in (tasks, _with_copies_reversed(tasks))]
    if _names(orders[0]) == _names(orders[1]):
        del orders[1]
    plans = [(ordered, _Plan(ordered, results)) for ordered in orders]
    one, *batches = (
        max(_touched_bytes(ordered, plan, count) for ordered, plan in plans) for count in (1, *RUN_BATCHES)
    )
    growths = (-(-(many - one) // (count - 1)) for count, many in zip(RUN_BATCHES, batches, strict=True))
    return RunBytes(one, max(0, *growths), tuple(batches))


def _with_copies_reversed(tasks: Sequence[Task]) -> list[Task]:
    """Copies out of blocks have each other's places, the first that of the last."""
    places = [each.place for each in tasks if _leaves_blocks(each)]
    return [each._replace(place=places.pop()) if _leaves_blocks(each) else each for each in tasks]


def _leaves_blocks(task: Task) -> bool:
    return task.is_copy and not task.made[0].tensor.is_blocked


def _names(tasks: Sequence[Task]) -> list[tuple[Made, ...]]:
    """In what order the tasks run."""
    return [each.made for each in tasks]


def _touched_bytes(ordered: Sequence[Task], plan: "_Plan", requests: int) -> int:
    """requests: every tensor is so many times as large.

    Of several runs, since a worker may begin the next while the answers of one are still in their blocks: they are
    freed once they were sent, here when the next run ends. Until then other blocks are the best fit.
    """
    arena, held = Arena(), list[int]()
    for _ in range(_RUNS):
        addresses = dict[int, int]()
        for number, task in enumerate(ordered):
            for each in task.made:
                block = plan.blocks.get(each.tensor)
                if block is not None and block not in addresses:
                    addresses[block] = arena.allocate(requests * each.bytes)
            if task.inner_bytes:
                arena.free(arena.allocate(requests * task.inner_bytes))
            for block in plan.ends.get(number, ()):
                arena.free(addresses[block])
        for address in held:
            arena.free(address)
        held = [addresses[block] for block in plan.results if block in addresses]
    return arena.touched_bytes


def execution_order(tasks: Sequence[Task], results: Sequence[Tensor]) -> list[Task]:
    """From what nothing reads back to what it waits for, depth first."""
    makers = {each.tensor: task for task in tasks for each in task.made}
    read = {tensor for task in tasks for tensor in task.reads}
    ends = [task for task in tasks if not any(each.tensor in read for each in task.made)]
    stack = [(task, False) for task in sorted(ends, key=lambda each: each.place)]
    visited, ordered = set[int](), list[Task]()
    while stack:
        task, is_left = stack.pop()
        if is_left:
            ordered.append(task)
            continue
        if id(task) in visited:
            continue
        visited.add(id(task))
        stack.append((task, True))
        waits_for = {id(made): made for name in task.reads if (made := makers.get(name)) is not None}
        stack += [(each, False) for each in sorted(waits_for.values(), key=lambda each: each.place)]
    return ordered


class _Plan:
    """Which block each tensor is in. As the runtime plans it: a view and what is computed in place share the block of
    their input; else a tensor takes a block of its own size in which nothing is left to be read. A block that another
    tensor takes later is not freed in between."""

    def __init__(self, tasks: Sequence[Task], results: Sequence[Tensor]) -> None:
        # By tensor. Views of what the caller holds have none, nor has what nothing reads.
        self.blocks = dict[Tensor, int]()
        # By number of a task: the blocks that are freed after it. Those of results are not.
        self.ends = dict[int, list[int]]()
        self._uses = Counter(tensor for task in tasks for tensor in task.reads)
        self._uses.update(results)
        self._results = frozenset(results)
        # By block: uses that are left, and the shape that it was made for.
        self._left = list[int]()
        self._shapes = list[_Shape | None]()
        # By shape: the blocks in which nothing is left to be read, the latest last.
        self._dead = defaultdict[_Shape | None, list[int]](list)
        last = dict[int, int]()
        for number, task in enumerate(tasks):
            for number_made, made in enumerate(task.made):
                uses = self._uses[made.tensor]
                block = self._choose(task, made, is_first=not number_made) if uses else None
                if block is not None:
                    self.blocks[made.tensor], last[block] = block, number
                    self._left[block] += uses
            for tensor in task.reads:
                block = self.blocks.get(tensor)
                if block is not None:
                    last[block] = number
                    self._left[block] -= 1
                    if self._left[block] == 0:
                        self._dead[self._shapes[block]].append(block)
        # Those that the caller holds after a run, in order.
        self.results = sorted({self.blocks[tensor] for tensor in results if tensor in self.blocks})
        held = set(self.results)
        for block, number in last.items():
            if block not in held:
                self.ends.setdefault(number, []).append(block)

    def _choose(self, task: Task, made: Made, *, is_first: bool) -> int | None:
        """None: it is in no block."""
        shape = None if made.shape is None else (made.bytes, *made.shape)
        if made.tensor not in self._results:
            if is_first and task.is_view:
                return self.blocks.get(task.reads[0]) if task.reads else None
            for other in task.reusable if is_first and shape is not None else ():
                block = self.blocks.get(other)
                if block is not None and self._left[block] == 1 and self._shapes[block] == shape:
                    return block
            if shape is not None and (dead := self._dead[shape]):
                return dead.pop()
        self._shapes.append(shape)
        self._left.append(0)
        return len(self._shapes) - 1
