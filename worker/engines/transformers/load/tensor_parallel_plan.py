"""A model's matrices divided among ranks: whose slice is which, and what has to be added up or put together.

As Megatron-LM divides a transformer (Shoeybi et al. 2019, section 3). Matrices that spread the hidden state over heads
or over the width of an MLP are divided by outputs, so that a rank computes its own heads and its own part of the width,
and nobody else needs to know of them. Those that go back to the hidden state are divided by inputs: each rank has a sum
of its own, and the sums are added up, twice in a layer. All else is the same on every rank. Which is which, the
family's own plan says (`base_model_tp_plan` of transformers' configurations, and `_tp_plan` for the head).

Law: it decides nothing. Among how many a model is divided, the router says.
"""

import re
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from worker.engines.transformers.load import architectures, layer_split
from worker.errors import StartError
from worker.protocol.architectures import DIVISIBLE
from worker.protocol.argv import ModelOptions

BY_OUTPUTS, BY_INPUTS, HEAD = "colwise", "rowwise", "colwise_gather_output"
_WHOLE = "replicated_with_grad_allreduce"
"""Of what is small and the same for each head; the gradients that it speaks of are none of ours."""


class Group(Protocol):
    """The ranks, as their models need them. Each call is made by all of them, in the same order."""

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in the place of `tensor`."""

    def put_together(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[.., n]` of each to `[.., ranks * n]`, by rank."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Which of `count` equal slices."""

    rank: int
    count: int

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """A view. Raises StartError if it cannot be divided so."""
        size = tensor.shape[dim]
        if size % self.count:
            raise StartError(f"a matrix of {size} {'inputs' if dim else 'outputs'} cannot be divided by {self.count}")
        return tensor.narrow(dim, self.rank * (size // self.count), size // self.count)


def wanted(options: ModelOptions, config: Any) -> int:
    """Among how many ranks `options` have the model divided; 1: it is not. Raises StartError if it cannot be."""
    count = options.tensor_parallel
    if count == 1:
        return 1
    instead = "; pipeline-parallel puts whole layers on each accelerator"
    why = layer_split.cannot(config)
    if getattr(config, "quantization_config", None) or options.quantization not in ("auto", "none"):
        why = "its weights are quantised"
    elif options.max_loras:
        why = "requests may name adapters (max-loras)"
    if why:
        instead = ""
    elif options.layers:
        why, instead = "its layers are to be split as well (--layers)", ""
    else:
        why = cannot(config, count)
    if why:
        raise StartError(
            f"architecture {config.model_type!r} cannot be divided among {count} ranks: {why};"
            f" remove tensor-parallel{instead}"
        )
    return count


def cannot(config: Any, count: int) -> str:
    """Why a model of this configuration cannot be divided among so many; empty: it can, as far as that tells."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if config.model_type not in DIVISIBLE:
        if not plan:
            return "transformers has no plan for this family"
        unknown = sorted(set(plan.values()) - {BY_OUTPUTS, BY_INPUTS, _WHOLE})
        known = f" (its plan has {unknown[0]})" if unknown else ""
        return f"this version divides {', '.join(sorted(DIVISIBLE))} only{known}"
    heads: int = config.num_attention_heads
    shape = architectures.CacheShape.of(config)
    for number, what in ((heads, "attention heads"), (shape.kv_heads, "heads of keys and values")):
        if number % count:
            return f"it has {number} {what}, which {count} does not divide"
    if (getattr(config, "intermediate_size", None) or 0) % count:
        return f"its MLP is {config.intermediate_size} wide, which {count} does not divide"
    return ""


def divide(model: Any, part: Slice, group: Group) -> None:
    """Leave of each matrix in `model` the slice of one rank, a view, and have its layers do their part of a step.

    Raises StartError for a model that has something which its plan does not tell how to divide.
    """
    styles = _styles(model)
    head = model.get_output_embeddings() if is_divided(model, part.count) else None
    for name, module in model.named_modules():
        style = styles.get(re.sub(r"\.\d+\.", ".*.", name), "")
        if style == BY_OUTPUTS:
            _keep(module, part, 0)
        elif style == BY_INPUTS:
            _keep(module, part, 1)
            if part.rank:
                module.bias = None  # it is added once
            module.register_forward_hook(lambda module, args, output: group.add_up(output))
    if head is not None:
        _keep(head, part, 0)
        head.register_forward_hook(lambda module, args, output: group.put_together(output))
    _check_rest(model, styles)


def is_divided(model: Any, count: int) -> bool:
    """Whether the head is: not one that is the embeddings, which every rank needs as a whole, nor one of a vocabulary
    that cannot be divided."""
    head = model.get_output_embeddings()
    shared = {id(each) for each in model.get_input_embeddings().parameters()}
    if head is None or any(id(each) in shared for each in head.parameters()):
        return False
    name = next(name for name, module in model.named_modules() if module is head)
    vocabulary: int = model.config.get_text_config().vocab_size
    return _styles(model).get(name) == HEAD and vocabulary % count == 0


def _styles(model: Any) -> dict[str, str]:
    """By name of a module, a star in the place of a layer's number."""
    prefix = f"{model.base_model_prefix}."
    plan = model.config.base_model_tp_plan or {}
    styles = {f"{prefix}{name}": style for name, style in plan.items()}
    return styles | dict(type(model)._tp_plan or {})


def _keep(module: Any, part: Slice, dim: int) -> None:
    """Of a linear layer, the slice of one rank: of its outputs (0) or inputs (1)."""
    if type(module) is not nn.Linear:
        raise StartError(f"a {type(module).__name__} cannot be divided; remove tensor-parallel")
    module.weight = nn.Parameter(part.of(module.weight.detach(), dim), requires_grad=False)
    if dim == 0 and module.bias is not None:
        module.bias = nn.Parameter(part.of(module.bias.detach(), 0), requires_grad=False)
    module.out_features, module.in_features = module.weight.shape


def _check_rest(model: Any, styles: dict[str, str]) -> None:
    """What every rank has as a whole is applied to each head alike, or to the hidden state: vectors, in layers."""
    _, stack = layer_split.stack_of(model)
    divided = {id(module) for name, module in model.named_modules() if re.sub(r"\.\d+\.", ".*.", name) in styles}
    for name, module in stack.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(module) not in divided and parameter.ndim > 1:
                raise StartError(
                    f"{type(model).__name__} cannot be divided among ranks: its plan says nothing of {name}.{own},"
                    " which is a matrix; remove tensor-parallel"
                )


__all__ = ["Group", "Slice", "cannot", "divide", "is_divided", "wanted"]
