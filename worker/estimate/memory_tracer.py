"""The memory tracer: the most bytes that are alive at once while torch code runs, on real or fake tensors.

A dispatch mode sees each storage when it is made and when it is freed, so the peak is what an allocator would have to
provide. Fake tensors have no content. Where an operator depends on numbers, the tracer returns the largest result that
is possible.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

Step = Callable[[], object]


def peak_bytes(step: Step) -> int:
    """Return the most bytes that are alive at once while `step` runs, beside those from before."""
    return live_bytes(step).peak


def live_bytes(step: Step) -> "LiveBytes":
    """Run `step` and return its record of live bytes."""
    live = LiveBytes()
    # A step ends where it needs a number of a fake tensor.
    with live, _quick_lists(), suppress(DataDependentOutputException):
        step()
    return live


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are made while it is active and are still alive. A storage counts once,
    however many views it has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, tuple[torch.device, int]] = {}
        self.now = 0
        self.peak = 0
        self.operators = 0
        self.peaks: dict[torch.device, int] = {}  # by device
        self._on: dict[torch.device, int] = {}  # live bytes by device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.operators += 1
        if func in _VIEWS and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return _view(func, args, kwargs)
        is_number = func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor)
        if is_number and args[0].constant is None:
            return _worst(args[0].dtype)
        if func in _WORST_SHAPES and isinstance(args[0], FakeTensor):
            result = _WORST_SHAPES[func](*args)
            if result is not None:
                self._count(result)
                return result
        if func is torch.ops.aten.split_with_sizes.default and (parts := _unknown_parts(*args)):
            return parts
        # In inference mode composite operators arrive whole. Their own allocations have to count, too.
        computation = _AS_COMPILED.get(func) or _composite(func)
        if computation is not None:
            with self:
                return computation(*args, **kwargs)
        given = {storage_key(tensor) for tensor in (*_tensors(args), *_tensors(kwargs.values()))}
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            if storage_key(tensor) not in given:
                self._count(tensor)
        self._count_briefly(_cast_bytes(func, args, kwargs))
        return result

    def _count_briefly(self, size: int) -> None:
        """Count `size` bytes of main memory that were alive beside all others during an operator."""
        if size:
            self.peak = max(self.peak, self.now + size)
            self.peaks[_CPU] = max(self.peaks.get(_CPU, 0), self._on.get(_CPU, 0) + size)

    def _count(self, tensor: torch.Tensor) -> None:
        storage, device = tensor.untyped_storage(), tensor.device
        key = storage._cdata
        if key not in self._sizes:
            size = storage.nbytes()
            self._sizes[key] = device, size
            self.now += size
            self.peak = max(self.peak, self.now)
            self._on[device] = self._on.get(device, 0) + size
            self.peaks[device] = max(self.peaks.get(device, 0), self._on[device])
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        device, size = self._sizes.pop(key)
        self.now -= size
        self._on[device] -= size


_CPU = torch.device("cpu")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def _view(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FakeTensor:
    """Return a view of a fake tensor. torch's own way computes each new shape in Python, which was a third of the time
    of a trace."""
    base: FakeTensor = args[0]
    with in_kernel_invocation_manager(base.fake_mode):
        meta = func(*args, **kwargs)
    return FakeTensor(base.fake_mode, meta, base.device)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results of an operator: itself, or in lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _cast_bytes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the bytes of copies in another dtype that an operator makes internally on the CPU: of a summed tensor in a
    wider dtype, and of the narrower of two operands (torch 2.13)."""
    if func in _SUMS:
        summed = args[0]
        wide = kwargs.get("dtype") or (summed.dtype if summed.dtype.is_floating_point else torch.int64)
        return _size_as(wide, summed)
    operands = args[1:] if func is torch.ops.aten.where.self else args
    if len(operands) != 2 or not _is_pointwise(func):
        return 0
    if not all(isinstance(operand, torch.Tensor) for operand in operands) or operands[0].dtype == operands[1].dtype:
        return 0
    wide = torch.result_type(*operands)
    return sum(_size_as(wide, operand) for operand in operands)


def _size_as(dtype: torch.dtype, tensor: torch.Tensor) -> int:
    """Return the bytes of a copy in `dtype`; 0 if `tensor` has this dtype."""
    if tensor.dtype == dtype or tensor.device.type != "cpu":
        return 0
    return tensor.numel() * dtype.itemsize


# Operators that return a view of their first argument.
_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default,
        torch.ops.aten.expand.default, torch.ops.aten.permute.default, torch.ops.aten.select.int,
        torch.ops.aten.slice.Tensor, torch.ops.aten.squeeze.dim, torch.ops.aten.t.default,
        torch.ops.aten.transpose.int, torch.ops.aten.unsqueeze.default, torch.ops.aten.view.default,
    }
)  # fmt: skip
_SUMS = frozenset({torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList, torch.ops.aten.cumsum.default})


def _worst(dtype: torch.dtype) -> bool | int | float:
    """Return a stand-in for an unknown number. Conditions are false, so that the code does not return early."""
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _worst_list(tensor: torch.Tensor) -> Any:
    """Return `tensor.tolist()` of a fake tensor at once. torch's own takes each number by operators of its own, which
    was half of the time of a step with many rows."""
    found: Any = _worst(tensor.dtype)
    for size in reversed(tensor.shape):
        found = [found] * size
    return found


@contextmanager
def _quick_lists() -> Iterator[None]:
    """Read lists of fake tensors by `_worst_list` during the block."""
    own = FakeTensor.tolist
    FakeTensor.tolist = _worst_list  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FakeTensor.tolist = own  # type: ignore[method-assign]


def _grouped_product(tokens: torch.Tensor, experts: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return a grouped matrix product, which fake tensors implement in bfloat16 only."""
    return tokens.new_empty(*tokens.shape[:-1], experts.shape[-1])


def _every_index(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return all indices: any number of tokens may go to one expert."""
    return tensor.new_zeros(tensor.numel(), tensor.ndim, dtype=torch.int64)


def _every_row(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Return all rows for an index that is a mask; None for any other index."""
    (mask,) = indices if len(indices) == 1 else (None,)
    if mask is None or mask.dtype != torch.bool:
        return None
    return tensor.new_empty(mask.numel(), *tensor.shape[mask.ndim :])


def _unknown_parts(tensor: torch.Tensor, sizes: list[int], dim: int = 0) -> list[torch.Tensor]:
    """Return the parts of a tensor that is split by unknown numbers: all of it, then empty parts, as if one expert got
    all tokens. Return an empty list for sizes that are known."""
    if sum(sizes) == tensor.shape[dim]:
        return []
    return [tensor, *(tensor.narrow(dim, 0, 0) for _ in sizes[1:])]


def _dropout(tensor: torch.Tensor, share: float, train: bool) -> torch.Tensor:
    """Return the input itself outside of training; the decomposition in Python copies it."""
    return torch.native_dropout(tensor, share, train)[0] if train else tensor


def _safe_softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a softmax with the search for wholly masked rows, which fake tensors omit."""
    result = torch.softmax(tensor, dim, dtype=dtype)
    is_masked = tensor.eq(float("-inf"))
    return result.masked_fill_(is_masked.all(dim, keepdim=True), 0.0)


# Operators that allocate other tensors as compiled code than in their decomposition (torch 2.13).
_AS_COMPILED: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.dropout.default: _dropout,
    torch.ops.aten._safe_softmax.default: _safe_softmax,
}

# Results of operators whose shape depends on numbers, or that fake tensors do not implement.
_WORST_SHAPES: Mapping[Any, Callable[..., torch.Tensor | None]] = {
    torch.ops.aten._grouped_mm.default: _grouped_product,
    torch.ops.aten.nonzero.default: _every_index,
    torch.ops.aten.index.Tensor: _every_row,
}


@cache
def _is_pointwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags


@cache
def _composite(func: Any) -> Callable[..., Any] | None:
    """Return the computation of a composite operator by other operators; None for any other operator."""
    if func.namespace != "aten" or not func.has_kernel_for_dispatch_key(_COMPOSITE):
        return None
    # `decompose` prefers a second implementation in Python where there is one (of matrix products), which is slower.
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
        return partial(func._op_dk, _COMPOSITE)
    return func.decompose  # type: ignore[no-any-return]


def storage_key(tensor: torch.Tensor) -> int:
    """Return an identifier of the tensor's storage, valid while the storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key
