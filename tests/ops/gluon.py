"""A multiprocessor on which Gluon kernels run without a GPU, as Triton's interpreter runs others.

A kernel's functions run as they are, with torch in the place of the language: layouts say nothing,
values are whole tensors, pointers are places in a tensor's storage. Each part of a specialised
kernel is a thread of which one runs at a time: at each barrier and copy a seeded choice says which
goes on, and copies under way read and end at seeded times too, some of them late. What a copy is on
its way to holds NaN until then, so a part that reads too early, or one that lets go too early, is
found by what it computes; parts that wait for each other for ever are told apart by name.

Only what the resident replay kernels use is there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Thread, local
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WARP = 32


def _raw(x: Any) -> Any:
    return x.tensor if isinstance(x, Value) else x


class Value:
    """A tensor of a kernel, or a number of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        tensor = self.tensor
        return Value(tensor.contiguous().view(dtype) if bitcast else tensor.to(dtype))

    def __getitem__(self, places: Any) -> Value:
        return Value(self.tensor[places])

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __index__(self) -> int:
        return int(self.tensor)

    def __neg__(self) -> Value:
        return Value(-self.tensor)

    def __invert__(self) -> Value:
        return Value(~self.tensor)


def _binary(name: str) -> Callable[[Value, Any], Any]:
    def operate(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        found = getattr(self.tensor, name)(_raw(other))
        return found if found is NotImplemented else Value(found)

    return operate


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "and",
    "or", "xor", "lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne",
):  # fmt: skip
    setattr(Value, f"__{_name}__", _binary(f"__{_name}__"))


@dataclass(frozen=True)
class PointerType:
    """What a pointer points at."""

    element_ty: torch.dtype


class Pointer:
    """Places in the storage of a tensor."""

    def __init__(self, memory: torch.Tensor, places: torch.Tensor) -> None:
        self.memory, self.places = memory, places

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Pointer:
        storage = tensor.untyped_storage()
        size = (storage.nbytes() // tensor.element_size(),)
        memory = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, size, (1,))
        return cls(memory, torch.tensor(tensor.storage_offset()))

    @property
    def dtype(self) -> PointerType:
        return PointerType(self.memory.dtype)

    def to(self, kind: PointerType, bitcast: bool) -> Pointer:
        assert bitcast
        ratio = kind.element_ty.itemsize / self.memory.element_size()
        places = (self.places / ratio).to(torch.int64)
        assert torch.equal((places * ratio).to(torch.int64), self.places), "between two elements"
        return Pointer(self.memory.view(kind.element_ty), places)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.places + _raw(other))

    __radd__ = __add__

    def __getitem__(self, places: Any) -> Pointer:
        return Pointer(self.memory, self.places[places])


@dataclass(frozen=True)
class Choice:
    """Places in the storage of one of two tensors of a type."""

    first: Pointer
    second: Pointer
    is_first: torch.Tensor
    first_places: torch.Tensor
    second_places: torch.Tensor


class Shared:
    """A part of shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def index(self, i: Any) -> Shared:
        return Shared(self.tensor[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.tensor.narrow(dim, start, length))

    def permute(self, axes: Sequence[int]) -> Shared:
        return Shared(self.tensor.permute(*axes))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], _layout: Any) -> Shared:
        return Shared(self.tensor.view(-1).view(dtype).view(*shape))

    def load(self, _layout: Any) -> Value:
        return Value(self.tensor.clone())

    def store(self, value: Value) -> None:
        assert tuple(self.tensor.shape) == value.shape
        self.tensor.copy_(value.tensor)


@dataclass
class Barrier:
    """PTX ISA, "mbarrier": a phase ends when all have arrived and all bytes have come."""

    count: int
    pending: int
    missing: int = 0
    phase: int = 0

    def arrive(self, count: int = 0, num_bytes: int = 0) -> None:
        """Count arrivals, and bytes that are now awaited, or below 0 have come."""
        self.pending -= count
        self.missing += num_bytes
        assert self.pending >= 0, "more have arrived than are expected"
        if self.pending == 0 and self.missing == 0:
            self.pending, self.phase = self.count, self.phase ^ 1


class Late(list[Any]):
    """A copy that others overtake."""


@dataclass(eq=False)
class Part:
    """A part of a kernel, in a thread."""

    name: str
    num_warps: int
    turn: Event = field(default_factory=Event)
    is_ready: Callable[[], bool] = lambda: True
    copies: list[Callable[[], None]] = field(default_factory=list)


class Multiprocessor:
    """Runs one program."""

    def __init__(self, program: int, num_programs: int, seed: int) -> None:
        self.program, self.num_programs = program, num_programs
        self.num_warps = 4
        self.random = random.Random(seed)
        self.barriers: dict[int, Barrier] = {}
        self.parts: list[Part] = []
        # what has been asked for: in sequence within a list
        self.under_way: list[list[Callable[[], None]]] = []
        self.error: BaseException | None = None
        self.done = Event()
        self.own = local()
        self.functions: dict[int, Callable[..., Any]] = {}
        self.language = self._language()

    def run(self, kernel: Any, *args: Any, **constants: Any) -> None:
        """Run the kernel to its end."""
        self.num_warps = constants.get("num_warps", self.num_warps)
        self._translated(kernel)(*args, **constants)
        if self.error is not None:
            raise self.error

    def _translated(self, kernel: Any) -> Callable[..., Any]:
        """Return a function of the kernel's language as one of Python."""
        function = kernel.fn
        if id(function) not in self.functions:
            names: dict[str, Any] = dict(function.__globals__)
            translated = FunctionType(
                function.__code__, names, function.__name__, function.__defaults__
            )
            self.functions[id(function)] = translated
            for name, value in list(names.items()):
                if name in self.language:
                    names[name] = self.language[name]
                # of either language, interpreted or not
                elif hasattr(value, "fn"):
                    names[name] = self._translated(value)
                elif type(value).__name__ == "constexpr":
                    names[name] = value.value
        return self.functions[id(function)]

    # --- parts

    def warp_specialize(
        self, parts: Sequence[tuple[Any, tuple[Any, ...]]], warps: Sequence[int], _: Any
    ) -> None:
        """Run all parts until each has ended."""
        numbers = [self.num_warps, *warps]
        for i, ((function, args), num_warps) in enumerate(zip(parts, numbers, strict=True)):
            part = Part(f"{function.__name__} {i}", num_warps)
            self.parts.append(part)
            work = partial(self._work, part, function, args)
            Thread(target=work, daemon=True).start()
        self._choose().turn.set()
        self.done.wait()

    def _work(self, part: Part, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        part.turn.wait()
        self.own.part = part
        try:
            if self.error is None:
                function(*args)
        except BaseException as error:
            self.error = self.error or error
        self.parts.remove(part)
        (self._choose().turn if self.parts else self.done).set()

    def _choose(self) -> Part:
        """Let copies end, or not, and return the part that goes on: any, after an error."""
        while self.error is None:
            ready = [part for part in self.parts if part.is_ready()]
            waiting = [copies for copies in self.under_way if copies]
            if waiting and (not ready or self.random.random() < 0.3):
                copies = self.random.choice(waiting)
                if ready and isinstance(copies, Late) and self.random.random() < 0.95:
                    continue
                try:
                    copies.pop(0)()
                except AssertionError as error:
                    self.error = error
            elif ready:
                return self.random.choice(ready)
            else:
                names = ", ".join(part.name for part in self.parts)
                self.error = RuntimeError(f"parts wait for each other: {names}")
        return self.parts[0]

    def _pause(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        part = self.own.part
        part.is_ready = is_ready
        following = self._choose()
        if following is not part:
            part.turn.clear()
            following.turn.set()
            part.turn.wait()
        if self.error is not None:
            raise self.error
        part.is_ready = lambda: True

    # --- the language

    def _language(self) -> dict[str, Any]:
        gl = SimpleNamespace(
            float32=torch.float32, bfloat16=torch.bfloat16, int32=torch.int32, int64=torch.int64,
            pointer_type=PointerType, static_range=range,
            arange=lambda start, end, _=None: Value(torch.arange(start, end, dtype=torch.int32)),
            zeros_like=lambda x: Value(torch.zeros_like(x.tensor)),
            zeros=lambda shape, dtype, _: Value(torch.zeros(shape, dtype=dtype)),
            full_like=lambda x, value: Value(torch.full_like(x.tensor, value)),
            where=_where,
            minimum=partial(_extreme, torch.minimum, min),
            maximum=partial(_extreme, torch.maximum, max),
            exp2=lambda x: Value(x.tensor.exp2()), floor=lambda x: Value(x.tensor.floor()),
            rsqrt=lambda x: Value(x.tensor.rsqrt()),
            sum=lambda x, axis: Value(x.tensor.sum(axis, dtype=x.dtype)),
            reshape=lambda x, shape: Value(x.tensor.reshape(*shape)),
            permute=lambda x, axes: Value(x.tensor.permute(*axes)),
            join=lambda a, b: Value(torch.stack([a.tensor, b.tensor], -1)),
            split=lambda x: tuple(map(Value, x.tensor.unbind(-1))),
            convert_layout=lambda x, *_, **__: x, associative_scan=_scan, load=_load, store=_store,
            allocate_shared_memory=_allocate, program_id=lambda _: self.program,
            num_programs=lambda _: self.num_programs, warp_specialize=self.warp_specialize,
            **dict.fromkeys(
                ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "DotOperandLayout",
                 "NVMMADistributedLayout"), lambda *_: None,
            ),
        )  # fmt: skip
        copies = SimpleNamespace(
            async_copy_global_to_shared=self._copy, mbarrier_arrive=self._arrive_when_copied
        )
        barriers = SimpleNamespace(
            MBarrierLayout=lambda: None, init=self._init, expect=self._expect, arrive=self._arrive,
            wait=lambda barrier, phase: self._pause(
                lambda: self._barrier(barrier).phase != int(phase)
            ),
        )  # fmt: skip
        return {
            "gl": gl, "tl": gl, "async_copy": copies, "mbarrier": barriers,
            "tma": SimpleNamespace(async_copy_global_to_shared=self._copy_tile),
            "mma_v2": _multiply,
            "barrier": lambda: None, "gdc_wait": lambda: None,
            "gdc_launch_dependents": lambda: None,
        }  # fmt: skip

    def _barrier(self, place: Shared) -> Barrier:
        return self.barriers[place.tensor.data_ptr()]

    def _init(self, place: Shared, count: int) -> None:
        self.barriers[place.tensor.data_ptr()] = Barrier(count, count)

    def _expect(self, place: Shared, num_bytes: int) -> None:
        self._barrier(place).arrive(1, num_bytes)
        self._pause()

    def _arrive(self, place: Shared, count: int = 1, pred: bool = True) -> None:
        if pred:
            self._barrier(place).arrive(count)
        self._pause()

    def _copy_tile(self, source: Any, start: Sequence[Any], place: Shared, target: Shared) -> None:
        row = int(start[0])
        rows, columns = source.block_shape
        target.tensor.fill_(float("nan"))

        def end() -> None:
            target.tensor.copy_(source.base[row : row + rows, :columns])
            self._barrier(place).arrive(num_bytes=-target.tensor.nbytes)

        kind = Late if self.random.random() < 0.2 else list
        self.under_way.append(kind([end]))
        self._pause()

    def _copy(self, target: Shared, source: Pointer | Choice, mask: Value | None = None) -> None:
        target.tensor.fill_(float("nan"))
        load = partial(_load, source, mask, None if mask is None else 0)
        # it may read at once, and end later
        found = load() if self.random.random() < 0.5 else None
        self._queue().append(lambda: target.store(load() if found is None else found))
        self._pause()

    def _arrive_when_copied(self, place: Shared, increment_count: bool) -> None:
        assert not increment_count

        barrier, count = self._barrier(place), self.own.part.num_warps * WARP
        self._queue().append(lambda: barrier.arrive(count))
        self._pause()

    def _queue(self) -> list[Callable[[], None]]:
        queue = self.own.part.copies
        if not any(queue is other for other in self.under_way):
            self.under_way.append(queue)
        return queue


def _where(mask: Value, a: Any, b: Any) -> Any:
    if not isinstance(a, Pointer):
        return Value(torch.where(_raw(mask), _raw(a), _raw(b)))
    sources = torch.broadcast_tensors(_raw(mask), a.places, b.places)
    return Choice(a, b, *sources)


def _multiply(a: Value, b: Value, sums: Value, input_precision: str | None = None) -> Value:
    """Return a @ b + sums; of fp32 the matrix units take the leading 11 bits."""
    assert (input_precision == "tf32") == (a.dtype is torch.float32)
    left, right = (_leading(x.tensor) for x in (a, b))
    return Value(left @ right + sums.tensor)


def _leading(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        return x.float()
    return (x.contiguous().view(torch.int32) & -8192).view(torch.float32)


def _extreme(of_tensors: Any, of_numbers: Any, a: Any, b: Any) -> Any:
    if not isinstance(a, Value) and not isinstance(b, Value):
        return of_numbers(a, b)
    a, b = (torch.as_tensor(_raw(x)) for x in (a, b))
    dtype = a.dtype if a.ndim else b.dtype
    return Value(of_tensors(a.to(dtype), b.to(dtype)))


def _scan(x: Any, axis: int, combine: Callable[..., Any]) -> Any:
    """Scan in halves, as threads do: what is combined need not be a run and one more."""
    parts = [x] if isinstance(x, Value) else list(x)
    size = parts[0].shape[axis]
    if size == 1:
        return x
    halves = []
    for start in (0, size // 2):
        narrowed = [Value(part.tensor.narrow(axis, start, size // 2)) for part in parts]
        scanned = _scan(narrowed[0] if isinstance(x, Value) else tuple(narrowed), axis, combine)
        halves.append([scanned] if isinstance(x, Value) else list(scanned))
    last = [Value(part.tensor.narrow(axis, size // 2 - 1, 1)) for part in halves[0]]
    combined = combine(*last, *halves[1])
    joined = tuple(
        Value(torch.cat([a.tensor, b.tensor], axis))
        for a, b in zip(halves[0], [combined] if isinstance(x, Value) else combined, strict=True)
    )
    return joined[0] if isinstance(x, Value) else joined


def _load(pointer: Pointer | Choice, mask: Value | None = None, other: Any = None) -> Value:
    if isinstance(pointer, Choice):
        first, second = pointer.first, pointer.second
        live = torch.tensor(True) if mask is None else mask.tensor
        found = [
            _load(Pointer(p.memory, places), Value(live & chosen), 0).tensor
            for p, places, chosen in (
                (first, pointer.first_places, pointer.is_first),
                (second, pointer.second_places, ~pointer.is_first),
            )
        ]
        return Value(torch.where(pointer.is_first, *found))
    if mask is None:
        return Value(pointer.memory[pointer.places])
    places, live = torch.broadcast_tensors(pointer.places, mask.tensor)
    found = pointer.memory[torch.where(live, places, 0)]
    other = torch.as_tensor(_raw(other), dtype=found.dtype)
    return Value(torch.where(live, found, other))


def _store(pointer: Pointer, value: Any, mask: Value | None = None) -> None:
    live = torch.tensor(True) if mask is None else mask.tensor
    found = torch.as_tensor(_raw(value)).to(pointer.memory.dtype)
    places, live, found = torch.broadcast_tensors(pointer.places, live, found)
    pointer.memory[places[live]] = found[live]


def _allocate(dtype: torch.dtype, shape: Sequence[int], _layout: Any) -> Shared:
    tensor = torch.empty(shape, dtype=dtype)
    return Shared(tensor.fill_(float("nan")) if dtype.is_floating_point else tensor.fill_(-1))


class Launcher:
    """A kernel whose programs run one after the other, each with a seed of its own."""

    def __init__(self, kernel: Any, seed: int = 0) -> None:
        self.kernel, self.seed = kernel, seed

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        (num_programs,) = grid

        def launch(*args: Any, **settings: Any) -> None:
            args = tuple(map(_argument, args))
            for program in range(num_programs):
                seed = self.seed * num_programs + program
                Multiprocessor(program, num_programs, seed).run(self.kernel, *args, **settings)

        return launch


def _argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer.of(x)
    if hasattr(x, "block_shape"):
        rows, columns = x.block_shape
        num_bytes = rows * columns * x.base.element_size()
        return SimpleNamespace(
            base=x.base, block_shape=x.block_shape, layout=None,
            block_type=SimpleNamespace(nbytes=num_bytes),
        )  # fmt: skip
    return x
