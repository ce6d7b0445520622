"""A pretended accelerator: fake tensors on `cuda:0`, and a record of operations for which the host would wait.

Fake tensors have devices, so mixing devices fails as on a real one. They have no values: code that reads one gets the
answer of `worker.estimate.memory_tracer`, and `Watch.waits` records it. Parts of torch that need a real device, above
all subscripts, are replaced by operators that do not.
"""

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from worker.estimate import memory_tracer

CUDA = torch.device("cuda:0")
TOLD = 3  # the value of every number that the host reads from its own memory
_aten = torch.ops.aten
# Operators whose result size depends on values, so that the host must wait for them.
_SIZED_BY_NUMBERS = frozenset(
    {
        _aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten.equal.default,
        _aten._unique2.default, _aten.repeat_interleave.Tensor, _aten.bincount.default,
    }
)  # fmt: skip
_BY_INDEX = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})


class Watch(memory_tracer.LiveBytes):  # type: ignore[no-untyped-call]
    """Records in `waits` each operator for which the host waits, with the line that called it.

    It is one mode with the memory tracer, because each further mode decomposes all operators again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        # For each call of torch's attention: query, keys, mask, and a flag for heads that share keys.
        self.attended: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == CUDA or _on_cuda(args) or _on_cuda(kwargs.values()):
            if _waits(func, args, kwargs):
                self._note(func)
            if func is _aten.convolution.default:
                return _convolved(*args)
        elif func is _aten._local_scalar_dense.default:
            return float(TOLD) if args[0].is_floating_point() else TOLD
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, func: Any) -> None:
        own = (__file__, memory_tracer.__file__)
        frames = [
            each for each in traceback.extract_stack() if "/torch/" not in each.filename and each.filename not in own
        ]
        self.waits.append(f"{func} at {'/'.join(frames[-1].filename.split('/')[-3:])}:{frames[-1].lineno}")


def _on_cuda(values: Iterable[Any]) -> bool:
    """Return whether one of `values` is on the device, or is a list with a tensor that is."""
    return any(
        value.is_cuda if isinstance(value, torch.Tensor) else isinstance(value, (list, tuple)) and _on_cuda(value)
        for value in values
    )


def _waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func in _SIZED_BY_NUMBERS:
        return True
    if func in _BY_INDEX:  # by a mask, or by numbers that are not on the device yet
        indices = [each for each in args[1] if each is not None]
        return any(each.device != args[0].device or each.dtype == torch.bool for each in indices)
    if func is _aten.copy_.default:
        ends = {args[0].device.type, args[1].device.type}
        return len(ends) > 1 and args[1].ndim > 0 and not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    if func is _aten._to_copy.default:
        ends = {args[0].device.type, (kwargs.get("device") or args[0].device).type}
        return len(ends) > 1 and not kwargs.get("non_blocking")
    return False


def _convolved(given: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Convolution computed for the CPU: fake tensors do not support it on CUDA."""
    there = [torch.empty_like(each, device="cpu") if isinstance(each, torch.Tensor) else each for each in rest]
    like = _aten.convolution.default(torch.empty_like(given, device="cpu"), *there)
    return given.new_empty(like.shape)


class _Bindings(TorchFunctionMode):
    """Replaces functions of torch's Python layer that need a device."""

    def __init__(self, watch: Watch):
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if func is F.scaled_dot_product_attention:
            grouped = bool(kwargs.get("enable_gqa", False))
            self._watch.attended.append((args[0], args[1], kwargs.get("attn_mask"), grouped))
        instead = _INSTEAD.get(func)
        return func(*args, **kwargs) if instead is None else instead(*args, **kwargs)


def _item(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    viewed, indices = _viewed(tensor, key)
    result: torch.Tensor = _aten.index.Tensor(viewed, indices) if indices else _aten.alias.default(viewed)
    return result


def _set_item(tensor: torch.Tensor, key: Any, value: Any) -> None:
    viewed, indices = _viewed(tensor, key)
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    if indices:
        _aten.index_put_.default(viewed, indices, value)
    else:
        _aten.copy_.default(viewed, value)


def _viewed(tensor: torch.Tensor, key: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """`tensor` after all parts of `key` except tensors, and these tensors by dimension."""
    keys = [torch.tensor(each) if isinstance(each, list) else each for each in (key if type(key) is tuple else [key])]
    taken = sum(_dimensions(each) for each in keys)
    place = next((number for number, each in enumerate(keys) if each is Ellipsis), len(keys))
    keys[place : place + 1] = [slice(None)] * (tensor.ndim - taken)
    indices: list[torch.Tensor | None] = []
    dim = 0
    for each in keys:
        if each is None:
            tensor, dim = _aten.unsqueeze.default(tensor, dim), dim + 1
        elif isinstance(each, torch.Tensor):
            indices += [*[None] * (dim - len(indices)), each]
            dim += _dimensions(each)
        elif isinstance(each, slice):
            if each != slice(None):
                tensor = _aten.slice.Tensor(tensor, dim, each.start, each.stop, each.step or 1)
            dim += 1
        else:
            tensor = _aten.select.int(tensor, dim, int(each))
    return tensor, indices


def _dimensions(key: Any) -> int:
    """The number of dimensions that one part of a subscript consumes."""
    if key is None or key is Ellipsis:
        return 0
    return key.ndim if isinstance(key, torch.Tensor) and key.dtype == torch.bool else 1


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


def _is_nonzero(tensor: torch.Tensor, *, as_tuple: bool = False) -> Any:
    found = _aten.nonzero.default(tensor)
    return found.unbind(1) if as_tuple else found


_INSTEAD: Mapping[Any, Any] = {
    torch.Tensor.__getitem__: _item,
    torch.Tensor.__setitem__: _set_item,
    torch.Tensor.__invert__: torch.bitwise_not,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.copy_: _aten.copy_.default,
    torch.Tensor.nonzero: _is_nonzero,
    torch.Tensor.pin_memory: lambda tensor: tensor,
    torch.nonzero: _is_nonzero,
}


class _Event:
    def record(self, stream: object) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        pass


# Replacements in `torch.cuda`.
_DEVICE = {
    "Event": _Event,
    "current_stream": lambda device: device,
    "get_device_capability": lambda device=None: (9, 0),
}


@contextlib.contextmanager
def accelerator() -> Iterator[Watch]:
    """Make all tensors of the block fake, and watch those on CUDA."""
    before = {name: getattr(torch.cuda, name) for name in _DEVICE}
    for name, instead in _DEVICE.items():
        setattr(torch.cuda, name, instead)
    try:
        watch = Watch()
        # Inference mode for the reason in `meta_model.no_memory`.
        with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode(), watch, _Bindings(watch):
            yield watch
    finally:
        for name, own in before.items():
            setattr(torch.cuda, name, own)


def moved(model: Any, device: torch.device = CUDA) -> Any:
    """`model` with all parameters and buffers on `device`, each moved once."""
    there: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in there:
                    sent = tensor.detach().to(device, non_blocking=True)
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    there[id(tensor)] = torch.nn.Parameter(sent, requires_grad=False) if is_weight else sent
                tensors[name] = there[id(tensor)]
    return model
