"""Everything that uses private parts of torch to resize a model that `fully_shard` has sharded.

torch fixes the mesh of a sharded model when it is made. The functions here give the same module, parameter and
optimizer-state objects another mesh and other local shards. `versions.py` lists the versions of torch for which the
tests of this file have passed; any other one is refused before this file is imported.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as compiled
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

import torch
from torch import Tensor, nn

log = logging.getLogger("shoal.torch")

_numbers = itertools.count(1)


# Groups and meshes


class Collectives:
    """The collectives of one group of workers, which may break when a worker dies.

    After a break all of them return at once, without a result: the step that uses them is done again. `broken` tells.
    `host` is the group for tensors in host memory, if the other one is for those on GPUs only.
    """

    def __init__(self, group: Any, wait: Callable[[Any], bool], host: Any = None) -> None:
        self.group, self._wait, self._host = group, wait, host or group
        self.broken = self.muted = False

    @property
    def size(self) -> int:
        return 1 if self.group is None else int(self.group.size())

    @property
    def rank(self) -> int:
        return 0 if self.group is None else int(self.group.rank())

    def _for(self, tensor: Tensor) -> Any:
        return self._host if tensor.device.type == "cpu" else self.group

    def _do(self, start: Callable[[], Any]) -> bool:
        if self.muted:
            return False
        if self.group is not None and not self.broken:
            try:
                work = start()
            except RuntimeError as error:  # the connection to a peer is closed already, for example
                log.warning("a collective broke: %s", error)
                self.broken = True
            else:
                self.broken = not self._wait(work)
        return not self.broken

    def all_gather(self, output: Tensor, part: Tensor) -> bool:
        if self.group is None:
            output.copy_(part)
            return True
        done = self._do(lambda: self._for(part)._allgather_base(output, part, c10d.AllgatherOptions()))
        if not done:
            output.zero_()
        return done

    def reduce_scatter(self, output: Tensor, whole: Tensor, op: Any = None) -> bool:
        """This worker's part of the sum. `whole` may be overwritten."""
        if self.group is None:
            output.copy_(whole)
            return True
        if whole.device.type == "cpu":
            # gloo's own sums everything, too, but its work cannot be interrupted: it ignores the time-out of a wait.
            done = self.all_reduce(whole, op)
            if done:
                output.copy_(whole.view(self.size, *output.shape)[self.rank])
        else:
            options = c10d.ReduceScatterOptions()
            options.reduceOp = op or dist.ReduceOp.SUM
            done = self._do(lambda: self.group._reduce_scatter_base(output, whole, options))
        if not done:
            output.zero_()
        return done

    def all_reduce(self, tensor: Tensor, op: Any = None) -> bool:
        options = c10d.AllreduceOptions()
        options.reduceOp = op or dist.ReduceOp.SUM
        return self._do(lambda: self._for(tensor).allreduce([tensor], options))

    def broadcast(self, tensor: Tensor, source: int) -> bool:
        options = c10d.BroadcastOptions()
        options.rootRank = source
        return self._do(lambda: self._for(tensor).broadcast([tensor], options))

    def exchange(self, sent: Tensor, sent_sizes: list[int], sizes: list[int]) -> Tensor | None:
        """Give each worker its part of `sent`; return the parts from all of them. None if it broke."""
        received = sent.new_empty(sum(sizes))
        if self.group is None:
            return received
        options = c10d.AllToAllOptions()
        done = self._do(lambda: self._for(sent).alltoall_base(received, sent, sizes, sent_sizes, options))
        return received if done else None


class _Group(dist.ProcessGroup):  # type: ignore[misc]  # torch is not type-checked
    """A process group for what torch itself does with sharded tensors: norms, full tensors, state dictionaries."""

    def __init__(self, collectives: Collectives, name: str) -> None:
        super().__init__(collectives.rank, collectives.size)
        self._collectives, self._name = collectives, name

    def getBackendName(self) -> str:  # torch's name
        return "gloo"

    @property
    def group_name(self) -> str:
        return self._name

    def size(self) -> int:
        return self._collectives.size

    def rank(self) -> int:
        return self._collectives.rank

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        op = getattr(options, "reduceOp", None)
        for tensor in tensors:
            self._collectives.all_reduce(tensor, op)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self.allreduce(tensors, options)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Any:
        for output, part in zip(outputs, inputs):
            self._collectives.all_gather(output, part)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, part: Tensor, options: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [part])

    _allgather_base = all_gather_single

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        for parts, mine in zip(outputs, inputs):
            flat = mine.new_empty(mine.numel() * len(parts))
            self._collectives.all_gather(flat, mine.reshape(-1))
            for part, value in zip(parts, flat.chunk(len(parts))):
                part.copy_(value.view(part.shape))
        return _done(outputs)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Any:
        for output, whole in zip(outputs, inputs):
            self._collectives.reduce_scatter(output, whole.clone(), getattr(options, "reduceOp", None))
        return _done(outputs)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        for tensor in tensors:
            self._collectives.broadcast(tensor, getattr(options, "rootRank", 0))
        return _done(tensors)

    def barrier(self, options: Any = None) -> Any:
        self._collectives.all_reduce(torch.zeros(1))
        return _done(None)


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return compiled._create_work_from_future(future)  # type: ignore[attr-defined]


def make_mesh(collectives: Collectives, device_type: str, before: DeviceMesh | None = None) -> DeviceMesh:
    """The mesh of these workers. Their group becomes torch's default group; that of the mesh `before` is forgotten."""
    world = c10d._world
    if before is not None:
        _forget(before._shoal_group)
    elif dist.is_initialized():
        raise RuntimeError(
            "torch.distributed was initialized before job.shard: leave out init_process_group, Shoal forms the groups"
        )
    name = f"shoal-{next(_numbers)}"
    group = _Group(collectives, name)
    world.pg_map[group] = ("gloo", None)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {i: i for i in range(collectives.size)}
    world.pg_backend_config[group] = "cpu:gloo"
    world.pg_to_tag[group] = ""
    world.tags_to_pg.setdefault("", []).append(group)
    c10d._register_process_group(name, group)
    c10d._update_default_pg(group)
    ranks = torch.arange(collectives.size, dtype=torch.int)
    # torch keeps what it has derived from a mesh for equal ones: the name makes them differ.
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=(name,), _init_backend=False, _rank=collectives.rank)
    mesh._dim_group_names = [name]
    mesh._pg_registry[name] = group
    mesh._shoal_group = group
    return mesh


def forget(mesh: DeviceMesh) -> None:
    """The process has no default group any more."""
    _forget(mesh._shoal_group)
    c10d._update_default_pg(None)


def _forget(group: Any) -> None:
    world = c10d._world
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
    ):
        table.pop(group, None)
    world.tags_to_pg[""] = [g for g in world.tags_to_pg.get("", []) if g is not group]
    c10d._unregister_process_group(group.group_name)
    group._collectives = None  # torch may keep the group, and would keep its connections open


# Layers and their parameters


@dataclass(frozen=True, slots=True)
class Sharded:
    """One parameter of a layer."""

    inner: Any  # torch's FSDPParam

    @property
    def param(self) -> nn.Parameter:
        """The parameter that the optimizer knows. The object stays the same over all changes."""
        return self.inner.sharded_param

    @property
    def shape(self) -> torch.Size:
        return self.inner._orig_size

    @property
    def rows(self) -> int:
        return int(self.shape[0])

    @property
    def local(self) -> Tensor:
        """This worker's rows."""
        return self.inner.sharded_param._local_tensor


def layers(model: nn.Module) -> list[list[Sharded]]:
    """The parameters that torch gathers together, in the same order on all workers."""
    return [[Sharded(inner) for inner in group.fsdp_params] for group in _param_groups(model)]


def _param_groups(model: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if id(group) not in seen:
                    seen.add(id(group))
                    yield group


def meshes(model: nn.Module) -> list[DeviceMesh]:
    return [group.mesh_info.mesh for group in _param_groups(model)]


def refusal(model: nn.Module) -> str | None:
    """Why a sharded model cannot be resized."""
    for group in _param_groups(model):
        after = group.post_forward_mesh_info
        if after is not None and after.mesh is not group.mesh_info.mesh:
            return "reshard_after_forward must be True, False or None, not a number"
        for inner in group.fsdp_params:
            if inner.fsdp_placement.dim != 0:
                return "only sharding along the first dimension (Shard(0)) can be resized"
            if inner.is_dtensor:
                return "tensor-parallel parameters (DTensors before fully_shard) cannot be resized"
            if inner.offload_to_cpu:
                return "CPU offloading cannot be resized"
            if inner.sharded_param.device.type == "meta":
                return "parameters are on the meta device: give them values before job.shard"
    return None


def release(model: nn.Module) -> None:
    """Free parameters that are still gathered, for example after an evaluation."""
    for group in _param_groups(model):
        group._to_sharded()


def set_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let torch gather and scatter over another mesh. Follows `relayout` or `rebind` of all parameters."""
    info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    for group in _param_groups(model):
        group.mesh_info = info
        if group.post_forward_mesh_info is not None:
            group.post_forward_mesh_info = info
        for inner in group.fsdp_params:
            inner.mesh_info = info
            inner._shard_mesh = inner._spmd_mesh = mesh
            if inner.post_forward_mesh_info is not None:
                inner.post_forward_mesh_info = info


def _spec(inner: Any, mesh: DeviceMesh) -> DTensorSpec:
    return DTensorSpec(mesh, (Shard(0),), tensor_meta=inner._sharding_spec.tensor_meta)


def relayout(sharded: Sharded, mesh: DeviceMesh, padded: Tensor, rows: int) -> None:
    """Give a parameter another mesh and its rows there: the first `rows` of `padded`. Its gradient is dropped."""
    inner = sharded.inner
    local = padded.narrow(0, 0, rows)
    inner._sharding_spec = _spec(inner, mesh)
    inner.sharded_size = local.size()
    inner.contiguous_sharded_stride = torch.empty(local.size(), device="meta").stride()
    inner.padded_sharded_param_size = padded.size()
    inner._sharded_param_data = padded.view(-1)
    inner.sharded_param.grad = None
    inner.sharded_param._local_tensor = local
    inner.sharded_param._spec = inner._sharding_spec
    inner.unsharded_accumulated_grad = None
    inner.all_gather_outputs = []  # made anew by the next all-gather, for the new number of workers
    inner.__dict__.pop("_unsharded_param", None)


def rebind(sharded: Sharded, mesh: DeviceMesh) -> None:
    """Give a parameter and its gradient another mesh of the same workers."""
    inner = sharded.inner
    inner._sharding_spec = _spec(inner, mesh)
    for tensor in (inner.sharded_param, inner.sharded_param.grad):
        if tensor is not None:
            tensor._spec = inner._sharding_spec


def local_of(value: Any) -> Any:
    """The rows of a sharded tensor that this worker has; anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def like(sharded: Sharded, local: Tensor) -> Tensor:
    """These rows as a tensor that is sharded as the parameter is."""
    inner = sharded.inner
    spec = inner._sharding_spec
    meta = spec.tensor_meta
    if meta.dtype != local.dtype:
        spec = DTensorSpec(
            spec.mesh, spec.placements, tensor_meta=type(meta)(meta.shape, meta.stride, local.dtype)
        )
    return DTensor(local, spec, requires_grad=False)


# Gradients


class _Allocator:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocator, AllGather):  # type: ignore[misc]
    def __init__(self, gather: Callable[[Tensor, Tensor], Any]) -> None:
        self._gather = gather

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        self._gather(output_tensor, input_tensor)


class _Scatter(_Allocator, ReduceScatter):  # type: ignore[misc]
    def __init__(self, scatter: Callable[[Tensor, Tensor], Any]) -> None:
        self._scatter = scatter

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._scatter(output_tensor, input_tensor)


def use(
    model: nn.Module,
    gather: Callable[[Tensor, Tensor], Any],
    scatter: Callable[[Tensor, Tensor], Any],
    reduced: Callable[[int, Tensor], Any],
) -> None:
    """Let torch gather parameters and sum gradients by these functions.

    `reduced` is called with the number of the layer and this worker's part of the sum of its gradients.
    """
    index = 0
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = module._get_fsdp_state()._fsdp_param_groups
        if not groups or groups[0]._all_reduce_hook is not None:
            continue
        module.set_custom_all_gather(_Gather(gather))
        module.set_custom_reduce_scatter(_Scatter(scatter))
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)  # the weights of the workers add up to 1
        module.set_all_reduce_hook(lambda part, index=index: reduced(index, part))
        index += 1
