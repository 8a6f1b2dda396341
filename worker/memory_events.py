"""How often the kernel has killed a process for memory in this process's control group."""

from pathlib import Path


def oom_kills() -> int:
    """Counter of cgroup v2 (``memory.events``) or v1 (``memory.oom_control``); 0 without either."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return _counter(Path("/sys/fs/cgroup/memory"), path, "memory.oom_control")
        if controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return _counter(Path("/sys/fs/cgroup"), path, "memory.events")
    return 0


def _counter(root: Path, path: str, name: str) -> int:
    # In a container the path is the host's, and what is mounted at the root is the container's own group.
    for file in (root / path.lstrip("/") / name, root / name):
        try:
            fields = dict(line.split() for line in file.read_text().splitlines())
        except OSError:
            continue
        return int(fields.get("oom_kill", 0))
    return 0
