"""How often the kernel has killed a process for memory, as near to this process as it is counted."""

from pathlib import Path


def oom_kills() -> int:
    """Counter of cgroup v2 (``memory.events``) or v1 (``memory.oom_control``), else the whole machine's."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            found = _counter(Path("/sys/fs/cgroup/memory"), path, "memory.oom_control")
        elif controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            found = _counter(Path("/sys/fs/cgroup"), path, "memory.events")
        else:
            continue
        if found is not None:
            return found
    return _field(Path("/proc/vmstat"), "oom_kill") or 0


def _counter(root: Path, path: str, name: str) -> int | None:
    # In a container the path is the host's, and what is mounted at the root is the container's own group.
    found = (_field(file, "oom_kill") for file in (root / path.lstrip("/") / name, root / name))
    return next((count for count in found if count is not None), None)


def _field(file: Path, name: str) -> int | None:
    """None where there is no such file, or no such line in it."""
    try:
        fields = dict(line.split() for line in file.read_text().splitlines())
    except OSError:
        return None
    return int(fields[name]) if name in fields else None
