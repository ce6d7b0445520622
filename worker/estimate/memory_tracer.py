"""How many bytes are alive at once while code of torch's runs, on real tensors or on fake ones.

A dispatch mode sees every storage come and go, so the largest sum is what an allocator would be asked for. Of fake
tensors, which have no content, it answers what depends on numbers with the largest result that could be.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Step = Callable[[], object]


def peak_bytes(step: Step) -> int:
    """The most bytes that are alive at once while `step` runs, beside those that were there before."""
    return live_bytes(step).peak


def live_bytes(step: Step) -> "LiveBytes":
    """What was alive while `step` ran."""
    live = LiveBytes()
    # the end: fake tensors have no numbers to hand out
    with live, suppress(DataDependentOutputException):
        step()
    return live


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that come to be while it is active, and are still alive.

    Each storage counts once, whatever views of it there are. Works on real tensors as on fake ones.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, tuple[torch.device, int]] = {}
        self.now = 0
        self.peak = 0
        self.peaks: dict[torch.device, int] = {}
        """By device."""
        self._on: dict[torch.device, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _worst(args[0].dtype)
        if func in _WORST_SHAPES and isinstance(args[0], FakeTensor):
            result = _WORST_SHAPES[func](*args)
            if result is not None:
                self._count(result)
                return result
        if func is torch.ops.aten.split_with_sizes.default and sum(args[1]) != args[0].shape[0] and len(args[1]) == 1:
            return [args[0]]  # of a size that nobody knows: all of it
        if func in _AS_COMPILED:
            with self:
                return _AS_COMPILED[func](*args, **kwargs)
        if func.namespace == "aten":
            # In inference mode composite operators arrive whole; what they allocate inside counts, too.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        given = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in given:
                self._count(leaf)
        self._pass_by(_cast_bytes(func, args, kwargs))
        return result

    def _pass_by(self, size: int) -> None:
        """So many bytes of main memory were alive beside all others, and are not any more."""
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


def _cast_bytes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Of copies in another type that an operator makes for itself on the processor, and that nobody sees come or go: of
    what is added up in a wider one, and of the narrower of two operands (seen in torch 2.13)."""
    if func in _SUMS:
        summed = args[0]
        wide = kwargs.get("dtype") or (summed.dtype if summed.dtype.is_floating_point else torch.int64)
        return _size_as(wide, summed)
    operands = args[1:] if func is torch.ops.aten.where.self else args
    if torch.Tag.pointwise not in func.tags or len(operands) != 2:
        return 0
    if not all(isinstance(each, torch.Tensor) for each in operands):
        return 0
    wide = torch.result_type(*operands)
    return sum(_size_as(wide, each) for each in operands)


def _size_as(dtype: torch.dtype, tensor: torch.Tensor) -> int:
    """Bytes of a copy of that type; 0 if `tensor` has it."""
    if tensor.dtype == dtype or tensor.device.type != "cpu":
        return 0
    return tensor.numel() * dtype.itemsize


_SUMS = frozenset({torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList, torch.ops.aten.cumsum.default})


def _worst(dtype: torch.dtype) -> bool | int | float:
    """What to take for a number that nobody knows. A condition that ends early fails: the code goes the longer way."""
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _grouped_product(tokens: torch.Tensor, experts: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Fake tensors know this product in bfloat16 only."""
    return tokens.new_empty(*tokens.shape[:-1], experts.shape[-1])


def _every_index(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    """All tokens go to one expert: nobody knows which ones will."""
    return tensor.new_zeros(tensor.numel(), tensor.ndim, dtype=torch.int64)


def _every_row(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor | None:
    """A mask of rows lets all of them through."""
    (mask,) = indices if len(indices) == 1 else (None,)
    if mask is None or mask.dtype != torch.bool:
        return None
    return tensor.new_empty(mask.numel(), *tensor.shape[mask.ndim :])


def _dropout(tensor: torch.Tensor, share: float, train: bool) -> torch.Tensor:
    """Out of training it is its input; the one written in Python copies it."""
    return torch.native_dropout(tensor, share, train)[0] if train else tensor


def _safe_softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Looks for rows that are masked as a whole, which fake tensors leave out."""
    result = torch.softmax(tensor, dim, dtype=dtype)
    is_masked = tensor.eq(float("-inf"))
    return result.masked_fill_(is_masked.all(dim, keepdim=True), 0.0)


_AS_COMPILED: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.dropout.default: _dropout,
    torch.ops.aten._safe_softmax.default: _safe_softmax,
}
"""Operators that allocate something else as compiled code than as they are traced (seen in torch 2.13)."""


_WORST_SHAPES: Mapping[Any, Callable[..., torch.Tensor | None]] = {
    torch.ops.aten._grouped_mm.default: _grouped_product,
    torch.ops.aten.nonzero.default: _every_index,
    torch.ops.aten.index.Tensor: _every_row,
}
"""What to take for the result of operators whose shape depends on numbers, or that fake tensors refuse."""


def storage_key(tensor: torch.Tensor) -> int:
    """The same for all views of one storage, for as long as that lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


__all__ = ["LiveBytes", "Step", "live_bytes", "peak_bytes", "storage_key"]
