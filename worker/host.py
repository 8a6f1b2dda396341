"""Which host this is and what devices it has. Never imports torch: a worker holds no device itself."""

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from jobs.settings import Settings
from worker.launchers.environment import usable_cores


@dataclass(frozen=True)
class HostIdentity:
    name: str
    boot_id: str
    """Boot of the kernel and the namespace of process ids: within one, pid plus start time is an identity."""
    device: str
    """``cuda`` or ``cpu``."""
    slots: int


def this_host(settings: Settings) -> HostIdentity:
    gpus = len(cuda_devices())
    return HostIdentity(
        name=settings.host or socket.gethostname(),
        boot_id=boot_id(),
        device="cuda" if gpus else "cpu",
        slots=gpus or settings.slots or usable_cores(),
    )


def boot_id() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Containers share the kernel, and with it the boot; their process ids are their own.
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def cuda_devices() -> list[str]:
    """CUDA's name of each GPU that this worker may use; its place in the list is the GPU row's ``idx``."""
    names = [str(index) for index in range(_count_gpus())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names and visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return names


def _count_gpus() -> int:
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is not None:
        listed = subprocess.run([nvidia_smi, "--list-gpus"], capture_output=True, text=True, timeout=60)
        if listed.returncode == 0:
            return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0
