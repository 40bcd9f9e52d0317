"""Small real tests, run on request: bytes move, and are compared, the way that a cluster would move them.

All of it happens in children with time limits: a driver call that hangs costs its limit, not the diagnosis.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from slipstream.doctor.case import Case, some
from slipstream.doctor.verdict import Remedy, Verdict, absent, check, fail, ok, unchecked, warn
from slipstream.errors import SlipstreamError

_PAGE, _BATCH, _GPU_BATCH = 64 << 10, 4 << 20, 64 << 20
_CHILD_S = 20.0
_PAIR_S = 60.0
_MOST_PAIRS = 4
_PATHS_BEHIND = ("limits.shared-memory", "limits.memory")


def _copy(engine: str, memory: tuple[str, str], limit_s: float, batch_bytes: int = _BATCH) -> tuple[float, str]:
    """GB/s of verified pages between two fresh children, or 0 and why it did not work."""
    from slipstream.bench import transfer

    options = transfer.Options(
        engines=(engine,),
        memory=memory,
        sizes=(_PAGE,),
        batch_bytes=batch_bytes,
        directions=("push",),
        case_s=0.02,
        limit_s=limit_s,
        budget_s=2 * limit_s,
        block=False,
    )
    with tempfile.TemporaryDirectory(prefix="slipstream-doctor-") as folder:
        try:
            report = transfer.run(options, Path(folder), lambda text: None)
        except SlipstreamError as error:
            return 0.0, error.message
    if not report.rows:
        return 0.0, next((note for note in report.notes if "set up in" not in note), "nothing was measured")
    row = report.rows[0]
    return (row.gbps, "") if row.verified else (0.0, row.problem or "the bytes were not verified")


@check("active.shm-copy", "Pages through shared memory", causes=_PATHS_BEHIND, active=True, limit_s=2 * _CHILD_S)
def shm_copy(case: Case) -> Verdict:
    rate, problem = _copy("shm", ("cpu", "cpu"), _CHILD_S)
    if not problem:
        return ok(f"4 MiB in scattered pages between two processes, verified, {rate:.1f} GB/s")
    return fail(
        problem,
        wanted="every byte in place",
        why="workers of one machine exchange KV this way when GPUs cannot reach each other",
        remedy="memory files (memfd) and Unix sockets must work between processes of this user",
    )


@check("active.tcp-copy", "Pages over tcp on loopback", causes=("network.loopback",), active=True, limit_s=2 * _CHILD_S)
def tcp_copy(case: Case) -> Verdict:
    rate, problem = _copy("tcp", ("cpu", "cpu"), _CHILD_S)
    if not problem:
        return ok(f"4 MiB in scattered pages over 127.0.0.1, verified, {rate:.1f} GB/s")
    return fail(
        problem,
        wanted="every byte in place",
        why="tcp is the way between machines, and the last one inside a machine",
        remedy="free ports on 127.0.0.1 must be connectable: look for a firewall on lo, and at network.free-ports",
    )


@check("active.gpu-copy", "Pages between GPUs", causes=("peer.access", "gpu.driver"), active=True, limit_s=4 * _PAIR_S)
def gpu_copy(case: Case) -> Verdict:
    pairs = [pair for pair in case.plan.pairs if pair.best.transport == "cuda_ipc"]
    if not pairs:
        return absent(f"no pair of GPUs is to use cuda_ipc ({case.path})")
    uuids = {gpu.name: gpu.uuid for gpu in case.machine.gpus}
    rates = []
    for pair in pairs[:_MOST_PAIRS]:
        rate, problem = _copy("cuda_ipc", (uuids[pair.a], uuids[pair.b]), _PAIR_S / 2, _GPU_BATCH)
        if problem:
            return fail(
                f"{pair.a} to {pair.b}: {problem}",
                wanted="every byte in place",
                why=f"the way of KV here is {case.path}",
                remedy=Remedy(
                    host="look at peer.iommu and peer.fabric; --transport shm stages through host memory",
                    container="one IPC and PID namespace for both workers (--ipc=host --pid=host), all GPUs visible "
                    "to both; --transport shm stages through host memory",
                ),
            )
        rates.append(f"{pair.a}-{pair.b} {rate:.0f} GB/s")
    more = f" (of {len(pairs)} pairs)" if len(pairs) > _MOST_PAIRS else ""
    return ok(f"64 MiB in scattered pages, verified: {some(rates)}{more}")


@check("active.registration", "NICs register memory", causes=("limits.memlock", "rdma.usable"), active=True)
def registration(case: Case) -> Verdict:
    if not case.usable_ports:
        return absent("no usable RDMA port")
    names = list(dict.fromkeys(nic.name for nic, _ in case.usable_ports))
    wrong = [f"{name}: {said}" for name in names[:8] if (said := _child(_REGISTER, name)) != "ok"]
    if any("libibverbs" in text for text in wrong):
        return unchecked("libibverbs.so.1 is not installed")
    if not wrong:
        return ok(f"64 MiB with {some(names[:8])}")
    return case.rdma_trouble(
        some(wrong),
        wanted="64 MiB of host memory registered with each NIC",
        why="a NIC that cannot register memory carries nothing",
        remedy=Remedy(
            host="raise the limit of locked memory (limits.memlock)",
            container="--ulimit memlock=-1 --cap-add=IPC_LOCK, and the device files",
        ),
    )


@check("active.cross-memory", "A process may read its sibling", causes=("container.ptrace",), active=True)
def cross_memory(case: Case) -> Verdict:
    if case.first("nixl", "nixl-cu12", "nixl-cu13") is None:
        return absent("nothing installed here uses process_vm_readv")
    said = _child(_READ_SIBLING)
    if said == "ok":
        return ok("process_vm_readv works")
    return warn(
        f"process_vm_readv: {said}",
        wanted="reading a sibling of the same user",
        why="UCX (below nixl) loses its fastest way for host memory",
        remedy=Remedy(
            host="sysctl kernel.yama.ptrace_scope=0",
            container="--cap-add=SYS_PTRACE, or leave cma out of UCX_TLS",
        ),
    )


@check("active.memory-policy", "Memory may be bound to a NUMA node", active=True)
def memory_policy(case: Case) -> Verdict:
    if sum(bool(node.cpus) for node in case.machine.numa_nodes) < 2:
        return absent("one NUMA node")
    said = _child(_BIND_MEMORY)
    if said == "ok":
        return ok("set_mempolicy works")
    return warn(
        f"set_mempolicy: {said}",
        wanted="permission to place memory",
        why="staging buffers may lie on the far socket",
        remedy=Remedy(
            host="allow the call in the service's SystemCallFilter",
            container="--cap-add=SYS_NICE",
            pod="add the capability SYS_NICE",
        ),
    )


def _child(program: str, *arguments: str) -> str:
    """What a small program prints, within a time limit."""
    command = [sys.executable, "-c", program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_CHILD_S / 4, stdin=subprocess.DEVNULL, text=True)
    except subprocess.TimeoutExpired:
        return f"no answer within {_CHILD_S / 4:g} s"
    return done.stdout.strip() or f"ended with {done.returncode}"


_REGISTER = """
import ctypes, mmap, os, sys
try:
    verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
except OSError:
    sys.exit(print("no libibverbs"))
for name in ("get_device_list", "get_device_name", "open_device", "alloc_pd", "reg_mr"):
    getattr(verbs, "ibv_" + name).restype = ctypes.c_void_p
verbs.ibv_get_device_name.restype = ctypes.c_char_p
count = ctypes.c_int()
devices = verbs.ibv_get_device_list(ctypes.byref(count))
listed = (ctypes.c_void_p * count.value).from_address(devices) if devices else []
found = [d for d in listed if verbs.ibv_get_device_name(ctypes.c_void_p(d)).decode() == sys.argv[1]]
if not found:
    sys.exit(print("libibverbs does not list it"))
context = verbs.ibv_open_device(ctypes.c_void_p(found[0]))
if not context:
    sys.exit(print("cannot be opened:", os.strerror(ctypes.get_errno())))
domain = verbs.ibv_alloc_pd(ctypes.c_void_p(context))
size = 64 << 20
memory = mmap.mmap(-1, size)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
region = domain and verbs.ibv_reg_mr(ctypes.c_void_p(domain), ctypes.c_void_p(address), ctypes.c_size_t(size), 7)
print("ok" if region else "registration failed: " + os.strerror(ctypes.get_errno()), flush=True)
os._exit(0)
"""

_READ_SIBLING = """
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
child = "import ctypes, sys; b = ctypes.create_string_buffer(b'pattern'); "
child += "print(ctypes.addressof(b), flush=True); sys.stdin.read()"
sibling = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
address = int(sibling.stdout.readline())
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
mine = ctypes.create_string_buffer(7)
here, there = Part(ctypes.addressof(mine), 7), Part(address, 7)
reader = os.fork()
if reader == 0:
    got = libc.process_vm_readv(sibling.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    print("ok" if got == 7 and mine.raw == b"pattern" else os.strerror(ctypes.get_errno()), flush=True)
    os._exit(0)
os.waitpid(reader, 0)
sibling.kill()
"""

_BIND_MEMORY = """
import ctypes, os, platform
number = {"x86_64": 238, "aarch64": 237}.get(platform.machine())
if number is None:
    print("not known on this processor")
else:
    libc = ctypes.CDLL(None, use_errno=True)
    print("ok" if libc.syscall(number, 0, None, 0) == 0 else os.strerror(ctypes.get_errno()))
"""

CHECKS = (shm_copy, tcp_copy, gpu_copy, registration, cross_memory, memory_policy)
