"""`job.shard`: shard a model with torch's `fully_shard`, and make it elastic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.fsdp import fully_shard

import torch
from shoal.torch.sharding import private
from torch import Tensor, nn

Layers = Iterable[nn.Module] | type[nn.Module] | tuple[type[nn.Module], ...] | None


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        raise RuntimeError(
            "batch norm in a sharded model is not supported: use layer or group norm, or a replicated model (job.wrap)"
        )
    if any(p.dim() == 0 for p in model.parameters()):
        raise RuntimeError("a parameter without dimensions cannot be sharded: give it the shape [1]")
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for g in optimizer.param_groups for p in g["params"]):
        raise RuntimeError(
            "the optimizer has parameters that are not the model's: make it with model.parameters(), "
            "and make a module with parameters (a criterion, for example) part of the model"
        )


def shard(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any, layers: Layers, options: dict[str, Any]
) -> None:
    """Apply `fully_shard` to the layers and the model, and let the optimizer use the sharded parameters."""
    before = dict(model.named_parameters())
    for layer in chosen_layers(model, layers):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    after = dict(model.named_parameters())
    renamed = {id(old): after[name] for name, old in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [renamed[id(p)] for p in group["params"]]
    if optimizer.state:
        raise RuntimeError("call job.shard before the first optimizer step")


def chosen_layers(model: nn.Module, layers: Layers) -> list[nn.Module]:
    """The modules that are gathered one at a time. By default: the elements of every `nn.ModuleList`."""
    if layers is None:
        found = [m for parent in model.modules() if isinstance(parent, nn.ModuleList) for m in parent]
    elif isinstance(layers, (type, tuple)) and all(isinstance(k, type) for k in _as_tuple(layers)):
        found = [m for m in model.modules() if isinstance(m, layers)]
    else:
        found = list(layers)  # type: ignore[arg-type]
    inside = {id(m) for m in model.modules()}
    for module in found:
        if not isinstance(module, nn.Module) or id(module) not in inside or module is model:
            raise ValueError("layers must be modules within the model, or classes of such modules")
    if layers is not None and not found:
        raise ValueError("layers names no module of the model")
    # Modules that share a parameter with others must be gathered together with them: they are left to the model.
    uses = _uses(model)
    unique = list({id(m): m for m in found}.values())
    outermost = [m for m in unique if not any(m is not n and m in set(n.modules()) for n in unique)]
    return [m for m in outermost if all(uses[id(p)] == _uses(m)[id(p)] for p in m.parameters())]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _uses(module: nn.Module) -> dict[int, int]:
    """How often each parameter is used in the module."""
    count: dict[int, int] = {}
    for _, child in module.named_modules(remove_duplicate=False):
        for param in child._parameters.values():
            if isinstance(param, Tensor):
                count[id(param)] = count.get(id(param), 0) + 1
    return count


def check_sharded(model: nn.Module, mesh: Any) -> None:
    """A model to which the script has applied `fully_shard` itself."""
    if any(m is not mesh for m in private.meshes(model)):
        raise RuntimeError(
            "fully_shard was applied with a mesh of its own, which cannot follow a change of workers: "
            "call fully_shard(..., mesh=job.mesh()), or let job.shard(model, optimizer) apply it"
        )
    managed = {id(s.param) for layer in private.layers(model) for s in layer}
    if any(id(p) not in managed for p in model.parameters()):
        raise RuntimeError("some parameters are not sharded: apply fully_shard to the whole model, too")
    if reason := private.refusal(model):
        raise RuntimeError(f"this sharded model cannot be resized: {reason}")
