"""Tensor parallelism: division of a model's matrices among ranks, and the collectives between them.

As in Megatron-LM (Shoeybi et al. 2019, section 3). Matrices from the hidden state to heads, or to the width of an MLP,
are divided by outputs, so each rank computes its own heads and part of the width. Matrices back to the hidden state are
divided by inputs: each rank has a partial sum, and an all-reduce adds them, twice in a layer. The width of each expert
is divided in the same way, so all ranks compute the same experts. Everything else is replicated. The plan of a family
names the kind of each matrix (`base_model_tp_plan` of transformers' configurations, and `_tp_plan` for the head).

The router decides the number of ranks.
"""

import re
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from worker.engines.transformers.load import architectures, layer_split, quantization
from worker.errors import StartError
from worker.protocol.architectures import DIVISIBLE
from worker.protocol.argv import ModelOptions

BY_OUTPUTS, BY_INPUTS, GATHERED = "colwise", "rowwise", "colwise_gather_output"
EXPERTS = "moe_tp_experts"
# Weights that each rank has as a whole. The gradients in the name do not matter for inference.
_WHOLE = "replicated_with_grad_allreduce"
_ATTENTION = {
    **{f"layers.*.self_attn.{name}_proj": BY_OUTPUTS for name in "qkv"},
    "layers.*.self_attn.o_proj": BY_INPUTS,
}
# Matrices that some of transformers' plans do not have: attention (PhiMoE, Jamba), latent attention (DeepSeek V3),
# dense MLPs (Jamba) and shared experts (Qwen2 MoE).
_ADDED = _ATTENTION | {
    **{f"layers.*.self_attn.{name}_b_proj": BY_OUTPUTS for name in ("q", "kv")},
    **{f"layers.*.self_attn.{name}": _WHOLE for name in ("q_a_proj", "kv_a_proj_with_mqa")},  # the same for each head
    **{
        f"layers.*.{mlp}.{name}_proj": style
        for mlp in ("feed_forward", "mlp.shared_expert")
        for name, style in (("gate", BY_OUTPUTS), ("up", BY_OUTPUTS), ("down", BY_INPUTS))
    },
    # Layers with states. Their recurrences need all channels.
    "layers.*.linear_attn.conv1d": _WHOLE,
    **{f"layers.*.mamba{name}": _WHOLE for name in ("", ".conv1d", ".in_proj", ".x_proj", ".dt_proj", ".out_proj")},
}
# The attention of OLMo 2, OLMo 3 and OLMoE, which normalises all heads together. Transformers' plan gathers queries,
# keys and values, so that each rank attends with all heads and caches all keys. Here only the norms see all heads.
_OVER_HEADS = "norm_over_heads"
_NORMALIZED = _ATTENTION | {f"layers.*.self_attn.{name}_norm": _OVER_HEADS for name in "qk"}


class RankGroup(Protocol):
    """Collectives between the ranks. All ranks make the same calls in the same order."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce: the sum over ranks, in place."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-gather: `[.., n]` of each rank to `[.., ranks * n]`, in order of ranks."""

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast: the leader's tensor, in place on other ranks."""


@dataclass(frozen=True, slots=True)
class RankSlice:
    """One of `count` equal slices."""

    rank: int
    count: int

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The slice of `tensor` along `dim` as a view. Raises StartError if the size is not divisible."""
        size = tensor.shape[dim]
        if size % self.count:
            raise StartError(f"a matrix of {size} {'inputs' if dim else 'outputs'} cannot be divided by {self.count}")
        return tensor.narrow(dim, self.rank * (size // self.count), size // self.count)


RankShare = tuple[RankSlice, RankGroup]  # the slice of this process, and its connection to the other ranks


def requested_ranks(options: ModelOptions, config: Any) -> int:
    """Number of ranks that `options` request; 1: not divided. Raises StartError if the model cannot be divided."""
    count = options.tensor_parallel
    if count == 1:
        return 1
    why, instead = layer_split.reason_against_split(config), ""
    if quantization.is_quantized(options, config):
        why = "its weights are quantized"
    elif not why and options.layers:
        why = "its layers are to be split as well (--layers)"
    elif not why:
        why = reason_against_division(config, count)
        instead = "; pipeline-parallel puts whole layers on each accelerator"
    if why:
        raise StartError(
            f"architecture {config.model_type!r} cannot be divided among {count} ranks: {why};"
            f" remove tensor-parallel{instead}"
        )
    return count


def reason_against_division(config: Any, count: int) -> str:
    """Reason why a model of this configuration cannot be divided by `count`; empty if it can, as far as known here."""
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
    for name, what in (
        ("intermediate_size", "MLP is"),
        ("intermediate_size_mlp", "dense MLP is"),
        ("moe_intermediate_size", "experts are"),
        ("shared_expert_intermediate_size", "shared expert is"),
        ("linear_num_value_heads", "linear attention is"),
    ):
        if (width := getattr(config, name, None) or 0) % count:
            return f"its {what} {width} wide, which {count} does not divide"
    return ""


def divide(model: Any, share: RankShare) -> None:
    """Replace each matrix in `model` by one rank's slice, a view, and install hooks for the collectives.

    Raises StartError for weights that the model's plan does not cover.
    """
    part, group = share
    whole_head = None if divides_head(model, part.count) else model.get_output_embeddings()
    styles = _module_styles(model)
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style == BY_OUTPUTS:
            _keep(module, part, 0)
        elif style == BY_INPUTS:
            _keep(module, part, 1)
            if part.rank:
                module.bias = None  # rank 0 adds it; the all-reduce would add it once per rank
            module.register_forward_hook(lambda module, args, output: group.all_reduce(output))
        elif style == GATHERED and module is not whole_head:
            _keep(module, part, 0)
            module.register_forward_hook(lambda module, args, output: group.all_gather(output))
        elif style == EXPERTS:
            _keep_experts(module, part, is_transposed="packed_rowwise" in model.config.base_model_tp_plan.values())
            module.register_forward_hook(lambda module, args, output: group.all_reduce(output))
        elif style == _OVER_HEADS:
            module.register_forward_pre_hook(lambda module, args: (group.all_gather(args[0]),))
            module.register_forward_hook(lambda module, args, output: part.of(output, -1))
    _check_rest(model, styles)


def divides_head(model: Any, count: int) -> bool:
    """True if the head is divided. It is not if it shares the embeddings, which every rank needs as a whole, or if the
    vocabulary is not divisible."""
    head = model.get_output_embeddings()
    if head is None or layer_split.has_tied_head(model):
        return False
    name = next(name for name, module in model.named_modules() if module is head)
    vocabulary: int = model.config.get_text_config().vocab_size
    return _module_styles(model).get(name) == GATHERED and vocabulary % count == 0


def divided_dims(model: Any) -> dict[str, int]:
    """By name of each divided linear layer: the dimension of its weight `[outputs, inputs]` that is divided."""
    dims = {BY_OUTPUTS: 0, GATHERED: 0, BY_INPUTS: 1}
    return {name: dims[style] for name, style in _module_styles(model).items() if style in dims}


def _module_styles(model: Any) -> dict[str, str]:
    """Plan entry of each module that the plan names, with a star in place of the layer number."""
    parent, _ = layer_split.stack_of(model)
    prefix = f"{next(name for name, module in model.named_modules() if module is parent)}."
    plan = _ADDED | (model.config.base_model_tp_plan or {})
    if plan["layers.*.self_attn.q_proj"] == GATHERED:
        plan |= _NORMALIZED
    styles = {f"{prefix}{name}": style for name, style in plan.items()} | dict(type(model)._tp_plan or {})
    starred = {name: re.sub(r"\.\d+\.", ".*.", name) for name, _ in model.named_modules()}
    return {name: styles[star] for name, star in starred.items() if star in styles}


def _keep(module: Any, part: RankSlice, dim: int) -> None:
    """Keep one rank's slice of a linear layer: of its outputs (dim 0) or inputs (dim 1)."""
    if type(module) is not nn.Linear:
        raise StartError(f"a {type(module).__name__} cannot be divided; remove tensor-parallel")
    module.weight = nn.Parameter(part.of(module.weight.detach(), dim), requires_grad=False)
    if dim == 0 and module.bias is not None:
        module.bias = nn.Parameter(part.of(module.bias.detach(), 0), requires_grad=False)
    module.out_features, module.in_features = module.weight.shape


def _keep_experts(module: Any, part: RankSlice, *, is_transposed: bool) -> None:
    """Keep one rank's slice of the width of all experts, which are stacked in two parameters."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if names != {"gate_up_proj", "down_proj"}:
        raise StartError(f"a {type(module).__name__} cannot be divided; remove tensor-parallel")
    # [experts, 2 * width, hidden] and [experts, hidden, width], or [experts, hidden, 2 * width] and its transpose
    first, second = (2, 1) if is_transposed else (1, 2)
    both = module.gate_up_proj.detach().unflatten(first, (2, -1))  # gate and up
    kept = part.of(both, first + 1).flatten(first, first + 1)  # a copy: the slices of gate and up are apart
    module.gate_up_proj = nn.Parameter(kept, requires_grad=False)
    module.down_proj = nn.Parameter(part.of(module.down_proj.detach(), second), requires_grad=False)
    module.intermediate_dim = module.down_proj.shape[second]


def _check_rest(model: Any, styles: dict[str, str]) -> None:
    """Raise StartError unless all weights in layers that the plan does not name are vectors or single rows, which apply
    to each head alike or to the hidden state, or choose experts by the hidden state."""
    _, stack = layer_split.stack_of(model)
    divided = {id(model.get_submodule(name)) for name in styles}
    for name, module in stack.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            chooses = len(parameter) == getattr(module, "num_experts", 0)
            if id(module) not in divided and parameter.ndim > 1 and len(parameter) > 1 and not chooses:
                raise StartError(
                    f"{type(model).__name__} cannot be divided among ranks: its plan has no entry for {name}.{own},"
                    " which is a matrix; remove tensor-parallel"
                )
