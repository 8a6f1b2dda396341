"""DeepSpeed's ``offload_optimizer`` and ``offload_param`` as tiers (``runtime/zero/offload_config.py``)."""

from typing import Any, cast

from zero_core.config.deepspeed_keys import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, Kind, Section
from zero_core.config.offload import OffloadConfig, Tier

TIERS: dict[str, Tier] = {"none": "device", "cpu": "host", "nvme": "disk"}


def offload(section: Section, stage: int) -> tuple[OffloadConfig, str | None]:
    """The tiers that ``zero_optimization`` asks for, and where the files of the disk tier go."""
    optimizer, optimizer_path = _read(section, "offload_optimizer", OFFLOAD_OPTIMIZER)
    parameters, parameters_path = _read(section, "offload_param", OFFLOAD_PARAM)
    if parameters != "device" and stage != 3:
        section.warn("offload_param", f"no effect at stage {stage}, as in DeepSpeed")
        parameters = "device"
    if parameters != "device" and optimizer == "device":
        section.warn("offload_param", "the optimizer's state, which is larger, leaves the device with them")
        optimizer = parameters
    if optimizer_path and parameters_path and optimizer_path != parameters_path:
        section.section("offload_param").warn("nvme_path", "no effect: the optimizer's is used for both")
    return OffloadConfig(optimizer, parameters), optimizer_path or parameters_path


def _read(section: Section, key: str, kinds: dict[str, Kind]) -> tuple[Tier, str | None]:
    part = section.section(key)
    given: dict[str, Any] = part.read(kinds)
    tier = TIERS[cast(str, part.choice("device", "none", tuple(TIERS)))]
    if tier == "device":
        return tier, None
    if given.get("ratio", 1.0) != 1.0:
        part.warn("ratio", "no effect: the whole of the optimizer's state is offloaded")
    if given.get("max_in_cpu"):
        part.warn("max_in_cpu", "no effect: the disk tier keeps nothing in memory between uses")
    if tier == "disk" and not given.get("nvme_path"):
        part.warn("nvme_path", "missing: files go to the system's temporary directory")
    return tier, given.get("nvme_path") if tier == "disk" else None
