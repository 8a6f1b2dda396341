"""From a model and its configuration to the engine's parts, in the order in which they need each other."""

import hashlib
import os
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from zero_core.comm.collectives import Communicator
from zero_core.comm.mesh import Mesh
from zero_core.comm.quantization import BlockQuantizer
from zero_core.config.zero import Precision, ZeroConfig
from zero_core.memory.arena import Arena
from zero_core.memory.heap import keep_what_is_freed
from zero_core.memory.ledger import Ledger
from zero_core.memory.region import Region
from zero_core.memory.tiers import Tiers
from zero_core.sharding.buffers import adopt_buffers
from zero_core.sharding.encoding import QUANTIZERS, Encoding, kept_as_stored
from zero_core.sharding.flat_gradient import GradientPolicy
from zero_core.sharding.flat_parameter import FlatParameter, ParameterPolicy, Weights
from zero_core.sharding.homes import Homes
from zero_core.sharding.partition import Part, partition
from zero_core.sharding.placement import Placement
from zero_core.sharding.program import buckets
from zero_core.sharding.schedule import ReplicatedSchedule
from zero_core.sharding.sharded_schedule import Lookahead, ShardedSchedule
from zero_core.sharding.unit import Unit

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


BUCKETS_UNDER_WAY = 2
"""Of reductions: each holds its whole gradients until it is complete."""

BUCKETS_READ_BY_PEERS = 1
"""The same where peers read them here: until it is known that they have, two buckets of backward pass."""

BUCKETS_KEPT_ANYWAY = 8
"""The same where whole gradients are kept until the step's end: more in flight costs little."""

COLLECTIVES_UNDER_WAY = 8
"""Of each flat parameter: between two agreements of all ranks a backward reduces and spreads it, late once
more, and the update gathers it."""

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class Assembly:
    device: torch.device
    arena: Arena
    ledger: Ledger
    tiers: Tiers
    communicator: Communicator
    schedule: ReplicatedSchedule | ShardedSchedule
    units: list[Unit]


def assemble(
    model: nn.Module, config: ZeroConfig, weights: Weights | None, device: torch.device | None
) -> Assembly:
    """Collective. Raises PlanMismatch where ranks hold different models, ValueError for what can't be."""
    parts = partition(model, config.unit_classes)
    if not any(parameter.requires_grad for part in parts for _, parameter in part.parameters):
        raise ValueError("the model has no trainable parameter: every one has requires_grad=False")
    device = device or _device_of(model)
    ledger = Ledger()
    arena = Arena(device, ledger)
    tiers = Tiers(device, arena, ledger, config.scratch_directory)
    homes = Homes.of(config.offload, config.precision, device)
    timeout = timedelta(seconds=config.timeout_seconds)
    packed = [pack(part, config, weights) for part in parts]
    _check_quantization(packed, config)
    communicator = Communicator(
        device,
        mesh_of(config),
        arena,
        timeout,
        under_way=COLLECTIVES_UNDER_WAY * sum(map(len, packed)),
        longest_message=_longest_message(parts),
    )
    communicator.check_same(
        _digest(parts, packed, config), "names, shapes or order of parameters, or the plan,"
    )
    shard_size = communicator.mesh.shard_size
    placement = Placement.of(config.stage, shard_size, config.accumulate_locally, homes.parameters_leave)
    schedule = _schedule(config, placement, homes, communicator)
    gradients = _gradient_policy(config, placement, communicator, arena, ledger)
    parameters = ParameterPolicy(
        dtype=DTYPES[config.precision],
        placement=placement,
        quantizer=BlockQuantizer(bits=8) if config.quantized_weights else None,
        weights=weights,
        tiers=tiers,
        homes=homes,
    )
    units = []
    for index, (part, groups) in enumerate(zip(parts, packed, strict=True)):
        flats = [
            FlatParameter(
                group.named,
                encoding=group.encoding,
                policy=parameters,
                gradients=gradients,
                communicator=communicator,
                arena=arena,
                ledger=ledger,
            )
            for group in groups
        ]
        units.append(Unit(index, part.name, part.modules, flats, schedule))
    if device.type == "cpu":
        keep_what_is_freed()
    for earlier, unit in pairwise(units):
        unit.earlier = earlier
    adopt_buffers(model, parameters.dtype, communicator)
    schedule.adopt(units)
    return Assembly(device, arena, ledger, tiers, communicator, schedule, units)


def _longest_message(parts: list[Part]) -> int:
    """Elements: a step tells of every parameter, stage 3 twice of every flat one."""
    return 8 + 2 * sum(len(part.parameters) for part in parts)


@dataclass(frozen=True)
class Group:
    """The parameters of one flat parameter to be."""

    named: list[Named]
    encoding: Encoding | None


def pack(part: Part, config: ZeroConfig, weights: Weights | None) -> list[Group]:
    """A unit's parameters as those of flat ones: apart by how they are kept, each up to a bucket's size.

    What makes a quarter of a bucket is a flat parameter of its own: its gradient then needs no copy. Those
    come after the small ones, norms above all, which have their last gradient when the unit's end comes.
    """
    kinds: dict[tuple[bool, Encoding | None], list[Named]] = {(True, None): [], (False, None): []}
    for name, parameter in part.parameters:
        encoding = None if parameter.requires_grad else _encoding(part, config, weights, name, parameter)
        kinds.setdefault((parameter.requires_grad, encoding), []).append((name, parameter))
    size = config.reduce_bucket_size
    packed: list[Group] = []
    for (_, encoding), mine in kinds.items():
        large = [[item] for item in mine if 4 * item[1].numel() >= max(size, 4)]
        small = [item for item in mine if 4 * item[1].numel() < max(size, 4)]
        sizes = [parameter.numel() for _, parameter in small]
        together = [[small[i] for i in bucket] for bucket in buckets(range(len(small)), sizes, size)]
        packed += [Group(named, encoding) for named in together + large]
    return packed


def _encoding(
    part: Part, config: ZeroConfig, weights: Weights | None, name: str, parameter: nn.Parameter
) -> Encoding | None:
    """How a frozen parameter is kept."""
    if config.frozen_quantization is not None and name in part.linear_weights:
        return QUANTIZERS[config.frozen_quantization]
    stored = parameter.dtype
    if parameter.is_meta and weights is not None and parameter.numel():
        stored = weights.stored_dtype(name)
    return kept_as_stored(stored, DTYPES[config.precision])


def _check_quantization(packed: list[list[Group]], config: ZeroConfig) -> None:
    quantization = config.frozen_quantization
    if quantization is None or any(
        group.encoding == QUANTIZERS[quantization] for groups in packed for group in groups
    ):
        return
    raise ValueError(
        f"frozen_quantization: {quantization!r} is for frozen weights of linear layers inside the blocks, "
        "and the model has none: freeze its base (requires_grad=False), or leave frozen_quantization out"
    )


def mesh_of(config: ZeroConfig) -> Mesh:
    """Ranks as the configuration groups them. A hybrid strategy shards inside a node."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    shard_size = config.shard_size
    if shard_size is None and config.strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        shard_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return Mesh(
        rank, world_size, shard_size or world_size, config.node_size or 1, config.secondary_shard_size or 1
    )


def _device_of(model: nn.Module) -> torch.device:
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _schedule(
    config: ZeroConfig, placement: Placement, homes: Homes, communicator: Communicator
) -> ReplicatedSchedule | ShardedSchedule:
    depth = BUCKETS_READ_BY_PEERS if communicator.peers_read_gradients else BUCKETS_UNDER_WAY
    if not placement.gradients:
        depth = BUCKETS_KEPT_ANYWAY
    if not placement.parameters:
        return ReplicatedSchedule(communicator, config.reduce_bucket_size, depth)
    # What leaves the device is read ahead instead, which takes longer than the gather itself.
    prefetch = 0 if homes.parameters_leave else config.prefetch_bucket_size
    lookahead = Lookahead(config.allgather_bucket_size, prefetch, config.reduce_bucket_size)
    return ShardedSchedule(communicator, lookahead, depth)


def _gradient_policy(
    config: ZeroConfig, placement: Placement, communicator: Communicator, arena: Arena, ledger: Ledger
) -> GradientPolicy:
    compute = DTYPES[config.precision]
    dtype = torch.float32 if config.gradient_accumulation_steps > 1 else compute
    bits = {"int8": 8, "int4": 4}
    return GradientPolicy(
        placement=placement,
        dtype=dtype,
        communication_dtype=DTYPES[config.communication_dtype or config.precision],
        quantizer=BlockQuantizer(bits=bits[config.quantized_gradients])
        if config.quantized_gradients
        else None,
        shards=Region(arena, ledger, dtype, "gradients"),
        direct=communicator.world_size == 1 and dtype == compute,
    )


def _digest(parts: list[Part], packed: list[list[Group]], config: ZeroConfig) -> bytes:
    text = [
        (part.name, [(name, tuple(p.shape), p.requires_grad) for name, p in part.parameters])
        for part in parts
    ]
    encodings = [[group.encoding for group in groups] for groups in packed]
    return hashlib.sha256(repr((text, encodings, config)).encode()).digest()
