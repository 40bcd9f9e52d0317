"""Limits of this process and its container: locked memory, files, processes, memory, shared memory."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.doctor.case import Case, size
from slipstream.doctor.verdict import Remedy, Verdict, absent, check, fail, ok, warn

_KIB64, _MIB8, _GIB = 64 << 10, 8 << 20, 1 << 30
_FILES_ENOUGH, _FILES_LEAST = 65536, 4096
_TASKS_LEAST = 256  # threads that one worker with its libraries may start
_MEMLOCK = Remedy(
    host="LimitMEMLOCK=infinity in the service's unit, or `memlock unlimited` in /etc/security/limits.conf",
    container="--ulimit memlock=-1 (and --cap-add=IPC_LOCK)",
    pod="add the capability IPC_LOCK, or raise LimitMEMLOCK of the container runtime on the node",
)


@check("limits.memlock", "Memory that may be locked")
def memlock(case: Case) -> Verdict:
    limit = case.system.limits.get("memlock")
    if limit is None or limit.soft is None:
        return ok("unlimited")
    seen = size(limit.soft)
    if case.rdma_matters and (case.usable_ports or case.rdma_asked):
        if limit.soft >= 64 * _GIB:
            return ok(seen)
        return case.rdma_trouble(
            seen,
            wanted="unlimited",
            why="a NIC has to register the whole KV pool, which locks it; small buffers pass, the pool fails",
            remedy=_MEMLOCK,
        )
    if limit.soft <= _KIB64:
        return warn(
            seen,
            wanted="8 MiB or more; unlimited with RDMA",
            why="nixl, mooncake and io_uring lock memory and fail at this limit; slipstream's own ways do not "
            f"({case.path})",
            remedy=_MEMLOCK,
        )
    return ok(f"{seen}; enough, nothing large is locked by this process ({case.path})")


@check("limits.open-files", "Open files and sockets")
def open_files(case: Case) -> Verdict:
    limit = case.system.limits.get("nofile")
    if limit is None or limit.reaches(_FILES_LEAST):
        return ok(f"{limit.soft if limit and limit.soft else 'unlimited'}")
    used = len(case.system.tree.list("/proc/self/fd"))
    if limit.soft is not None and limit.soft >= 1024 and (limit.hard is None or limit.hard >= _FILES_ENOUGH):
        return ok(f"{limit.soft} (up to {limit.hard or 'unlimited'} by `ulimit -n`): about {limit.soft - 200} streams")
    return warn(
        f"{limit.soft}, at most {limit.hard or 'unlimited'} ({used} in use)",
        wanted=f"{_FILES_ENOUGH}",
        why="each open stream of a client holds a socket in the front; beyond the limit connections fail",
        remedy=Remedy(
            host=f"ulimit -n {_FILES_ENOUGH}, or LimitNOFILE={_FILES_ENOUGH} in the service's unit",
            container=f"--ulimit nofile={_FILES_ENOUGH}:{_FILES_ENOUGH}",
            pod="raise LimitNOFILE of the container runtime on the node",
        ),
    )


@check("limits.processes", "Processes and threads")
def processes(case: Case) -> Verdict:
    rooms = [(limit - used, f"{used} of {limit} (cgroup)") for limit, used in _pids(case)]
    nproc = case.system.limits.get("nproc")
    if nproc and nproc.soft is not None and not case.system.root_user:
        rooms.append((nproc.soft, f"{nproc.soft} for this user (ulimit -u)"))
    if not rooms:
        return ok("no limit")
    room, seen = min(rooms)
    if room >= _TASKS_LEAST:
        return ok(seen)
    return (fail if room < 32 else warn)(
        seen,
        wanted=f"room for {_TASKS_LEAST} more",
        why="each worker starts compute, copy and HTTP threads; at the limit it ends with `can't start new thread`",
        remedy=Remedy(
            host="raise TasksMax of the unit, or ulimit -u",
            container="--pids-limit=-1",
            pod="raise podPidsLimit of the kubelet",
        ),
    )


def _pids(case: Case) -> Iterator[tuple[int, int]]:
    for folder in cgroup_folders(case, "pids"):
        limit, used = (case.system.tree.read(f"{folder}/pids.{name}") or "" for name in ("max", "current"))
        if limit.isdigit() and used.isdigit():
            yield int(limit), int(used)


@check("limits.memory", "Memory of the container")
def memory(case: Case) -> Verdict:
    limits = [value for value in _memory_limits(case) if value]
    seen = size(min(limits)) if limits else "no limit"
    if limits and min(limits) < 2 * _GIB:
        return warn(
            seen,
            wanted="the weights, the KV pool and about 2 GiB a worker",
            why="a worker that passes the limit is killed without a word (exit code 137)",
            remedy=Remedy(
                host="raise MemoryMax of the unit",
                container="raise or leave out --memory",
                pod="raise resources.limits.memory",
            ),
        )
    return ok(seen)


@check("limits.killed", "Processes killed for memory", causes=("limits.memory",))
def killed(case: Case) -> Verdict:
    folders = cgroup_folders(case, "memory")
    for folder in folders[:1] if case.place == "host" else folders:  # on a host those above count others' processes
        for file in ("memory.events", "memory.oom_control"):
            for line in (case.system.tree.read(f"{folder}/{file}") or "").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill" and count.strip().isdigit() and int(count) > 0:
                    return warn(
                        f"{int(count)} so far in this container",
                        wanted="none",
                        why="a worker that vanished with exit code 137 was one of them; pinned pools count too",
                        remedy=Remedy(
                            host="lower --kv-tokens or raise MemoryMax",
                            container="raise --memory, or lower --kv-tokens",
                            pod="raise resources.limits.memory, or lower --kv-tokens",
                        ),
                    )
    return ok("none")


def _memory_limits(case: Case) -> Iterator[int]:
    for folder in cgroup_folders(case, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = case.system.tree.read(f"{folder}/{name}") or ""
            if text.isdigit() and int(text) < 1 << 60:  # version 1 writes a huge number for "no limit"
                yield int(text)


def cgroup_folders(case: Case, controller: str) -> list[str]:
    """This process's control group and those above it, for either version of control groups."""
    folders = []
    for line in (case.system.tree.read("/proc/self/cgroup") or "0::/").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller in names.split(",") or (number == "0" and not names):
            base = f"/sys/fs/cgroup/{controller}" if names else "/sys/fs/cgroup"
            while path.strip("/"):
                folders.append(f"{base}{path.rstrip('/')}")
                path = path.rstrip("/").rpartition("/")[0]
            folders.append(base)
    return folders


@check("limits.shared-memory", "Room in /dev/shm")
def shared_memory(case: Case) -> Verdict:
    found = case.system.space("/dev/shm") if case.system.tree.exists("/dev/shm") else None
    why = "PyTorch and NCCL put buffers there; slipstream's own pools are memory files and need none of it"
    remedy = Remedy(
        host="mount -t tmpfs -o size=50% tmpfs /dev/shm",
        container="--ipc=host, or --shm-size=16g",
        pod="mount an emptyDir with medium: Memory at /dev/shm",
    )
    if found is None:
        return warn("there is no /dev/shm", wanted="a tmpfs of 1 GiB or more", why=why, remedy=remedy)
    seen = f"{size(found.free)} free of {size(found.total)}"
    if len(case.machine.gpus) < 2 or found.free >= _GIB:
        return ok(seen)
    return warn(seen, wanted="1 GiB free", why=why, remedy=remedy)


@check("limits.huge-pages", "Huge pages that were asked for")
def huge_pages(case: Case) -> Verdict:
    asked = case.env("MC_STORE_USE_HUGEPAGE", "MC_USE_HUGEPAGE", "MOONCAKE_USE_HUGEPAGE")
    if not asked or asked[0][1] in ("0", "false"):
        return absent("none asked for")
    lines = (case.system.tree.read("/proc/meminfo") or "").splitlines()
    free = next((line.split()[1] for line in lines if line.startswith("HugePages_Free:")), "0")
    if free != "0":
        return ok(f"{free} free")
    return fail(
        f"{asked[0][0]} is set and no huge page is free",
        wanted="pages reserved by the kernel",
        why="the pool is not made at all",
        remedy=Remedy(
            host="sysctl vm.nr_hugepages=..., or unset the variable", container="reserve them on the host, or unset it"
        ),
    )


CHECKS = (memlock, open_files, processes, memory, killed, shared_memory, huge_pages)
