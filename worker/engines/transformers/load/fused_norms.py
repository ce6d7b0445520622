"""RMS norms on accelerators, computed by torch's fused kernel.

transformers computes an RMS norm with seven operators. They are 450 of the 1,500 kernels in a decode step of an 8B
model (benchmarks/gpu.md). torch has one kernel for all but the multiplication with the weights. On the CPU it runs the
same seven operators.
"""

import inspect
from functools import partial

import torch
from torch import nn
from torch.func import functional_call

_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # names of the attribute in transformers' classes
_ROWS = 4  # of the comparison


def fuse(model: nn.Module) -> int:
    """Replace `forward` of each module that is equal to `_rms_norm`. Returns the number of these modules.

    The classes have no common base, and some multiply before they round, or add one to the weights. Each class is
    therefore compared by values, on the CPU and in the dtype of its weights, where equal operators give equal bits.
    """
    are_equal: dict[tuple[type[nn.Module], float, torch.dtype], bool] = {}
    fused = 0
    for module in model.modules():
        weight, epsilon = _parameters(module)
        if weight is None:
            continue
        key = type(module), epsilon, weight.dtype
        if key not in are_equal:
            are_equal[key] = _is_rms_norm(module, weight, epsilon)
        if are_equal[key]:
            module.forward = partial(_rms_norm, weight=weight, epsilon=epsilon)
            fused += 1
    return fused


def _parameters(module: nn.Module) -> tuple[nn.Parameter | None, float]:
    """The weights and the epsilon of what may be an RMS norm; None: it is none."""
    epsilons = [getattr(module, name) for name in _EPSILONS if isinstance(getattr(module, name, None), float)]
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if not epsilons or len(parameters) != 1 or weight is None or weight.dim() != 1:
        return None, 0.0
    return weight, epsilons[0]


def _is_rms_norm(module: nn.Module, weight: torch.Tensor, epsilon: float) -> bool:
    if len(inspect.signature(module.forward).parameters) != 1:  # Mamba's also take a gate
        return False
    random = torch.Generator().manual_seed(0)
    values = torch.randn(_ROWS, weight.shape[0], generator=random)
    weights = torch.randn(weight.shape, generator=random).to(weight.dtype)
    for dtype in (weight.dtype, torch.float32):  # T5 rounds to the dtype of the weights
        try:
            expected = functional_call(module, {"weight": weights}, (values.to(dtype),))
        except (RuntimeError, TypeError):  # a norm of another kind
            return False
        found = _rms_norm(values.to(dtype), weight=weights, epsilon=epsilon)
        if found.dtype != expected.dtype or not torch.equal(found, expected):
            return False
    return True


def _rms_norm(hidden_states: torch.Tensor, *, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[..., width] -> [..., width]. Rounds to the dtype of `hidden_states` before the multiplication."""
    return weight * nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], None, epsilon)
