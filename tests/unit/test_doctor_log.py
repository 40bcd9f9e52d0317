"""Known failures in logs: each row of the catalogue by a line as it is printed, and lines that only look alike."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

from slipstream.cli.main import cli
from slipstream.doctor import log
from slipstream.doctor.checks import CHECKS
from slipstream.doctor.symptoms import CATALOGUE
from slipstream.doctor.symptoms.symptom import Symptom, pattern, symptom
from slipstream.logs import JsonFormatter, TextFormatter

LINES = {
    "rdma-none-found": [
        "W0610 08:13:22.1 topology.cpp:42] No RDMA devices found, check your device installation",
        "I0610 08:13:22.2 transfer_engine.cpp:99] Topology discovery complete. Found 0 HCAs.",
    ],
    "rdma-device-closed": [
        "E0610 rdma_context.cpp:380] Failed to open device mlx5_3 : No such file or directory",
        "ibv_open_device(mlx5_1) failed: Operation not permitted",
    ],
    "rdma-cm-missing": [
        "[1718.1] [node1:44:0] rdmacm_cm.c:1020 UCX ERROR rdma_create_event_channel failed: No such device",
        "librdmacm: Fatal: unable to open /dev/infiniband/rdma_cm: No such file or directory",
    ],
    "socket-fallback": [
        "node1:77:77 [0] NCCL INFO Using network Socket",
        "node1:77:77 [0] NCCL INFO NET/IB : No device found.",
        "node1:77:77 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>",
    ],
    "rdma-libraries-mixed": [
        "ImportError: /usr/lib/libmlx5.so.1: undefined symbol: mlx5dv_devx_create_event_channel, version MLX5_1.25",
        "libibverbs.so.1: version `IBVERBS_PRIVATE_50' not found (required by /usr/lib/libmlx5.so.1)",
        "OSError: engine.so: undefined symbol: ibv_reg_dmabuf_mr",
    ],
    "nvml-unknown-error": ["Failed to initialize NVML: Unknown Error"],
    "driver-mismatch": ["Failed to initialize NVML: Driver/library version mismatch"],
    "memlock-limit": [
        "ib_device.c:1 UCX ERROR ibv_create_cq(cqe=4096) failed: Cannot allocate memory",
        ": Please set max locked memory (ulimit -l) to 'unlimited' (current: 64 kbytes)",
    ],
    "registration-no-memory": [
        "rdma_context.cpp:200] Failed to register memory 0x7f00: Cannot allocate memory [12]",
        "NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
    ],
    "open-files": ["OSError: [Errno 24] Too many open files"],
    "threads": [
        "RuntimeError: can't start new thread",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 64: Resource temporarily unavailable",
    ],
    "killed-for-memory": [
        "serve | 10:00:00.000 warning launch.supervise: decode-0 (pid 77) was ended by SIGKILL (out of memory?)",
        "Memory cgroup out of memory: Killed process 4242 (python)",
        "Child process unexpectedly failed with exitcode: -9. pid=4242",
        "container terminated with exit code 137",
    ],
    "shm-too-small": [
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-abc (size 9637888)",
        "Fatal Python error: Bus error",
        "RuntimeError: unable to write to file </torch_1>: /dev/shm/torch_1 (5): No space left on device",
        "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that dataloader's workers are out of",
    ],
    "pidfd-denied": ["RuntimeError: pidfd_getfd: Operation not permitted"],
    "cross-memory-denied": [
        "cma_ep.c:81 UCX ERROR process_vm_readv(pid=55 length=1024) returned -1: Operation not permitted"
    ],
    "fork-after-cuda": [
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use spawn"
    ],
    "sandboxed-kernel": ["W0101 frontend.go:300] nvproxy: unknown control command 0x3d05"],
    "memory-binding-denied": ["set_mempolicy: Operation not permitted", "mbind: Operation not permitted"],
    "far-cpus": ["WARNING: Failed to set NUMA affinity for GPU 3: cpuset is empty"],
    "out-of-disk": ["OSError: [Errno 28] No space left on device"],
    "gid-none": ["E0610 rdma_context.cpp:500] No suitable GID found on device mlx5_2"],
    "gid-index-invalid": [
        "NCCL WARN read failed in ncclIbRoceGetVersionNum: Invalid argument",
        "Invalid gid_index 3 for mlx5_0",
    ],
    "mtu-differs": ["rdma_endpoint.cpp:77] mtu mismatch: local 1024, peer 4096"],
    "gid-of-other-container": ["Fail to modify QP from INIT to RTR: No such device [19]"],
    "queue-pair-not-ready": [
        "E0610 rdma_endpoint.cpp:400] Failed to modify QP to RTR, check mtu, gid, peer lid: Connection timed out"
    ],
    "port-down": ["\tPhysical state: Polling", "\t\tphys_state:\t\tDISABLED (3)"],
    "port-init": ["\t\t\tstate:\t\t\tPORT_INIT (2)"],
    "link-flaps": ["NCCL WARN NET/IB : mlx5_1:1 Got async event : port error"],
    "pcie-ceiling": [
        "mlx5_core 0000:3b:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at 0000:3a:00.0"
    ],
    "device-name-unknown": [
        "Device mlx5_7 port not active",
        "E0610 No matched device found: mlx5_77",
        "UCX  WARN  network device 'mlx5_9:1' is not available, please use one or more of: 'mlx5_0:1'(IB)",
    ],
    "nic-number-as-name": [
        "ucp_context.c:771 UCX WARN network device 'NIC1:1' is not available, please use one or more of: 'mlx5_2:1'",
        "E0610 No matched device found: NIC4",
    ],
    "gpudirect-off": ["NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"],
    "peermem-not-registered": ["nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -2)"],
    "gpu-memory-not-registered": [
        "E0610 rdma_context.cpp:210] Failed to register memory 0x7fd1c0000000: Bad address [14]",
        "NCCL WARN Call to ibv_reg_mr failed with error Bad address",
    ],
    "peermem-refused": ["modprobe: ERROR: could not insert 'nvidia_peermem': Invalid argument"],
    "no-dma-buf-build": ["UCX ERROR ibv_reg_dmabuf_mr(address=0x7f00) failed: Operation not supported"],
    "small-bar1": ["nv_peer_mem: nvidia_p2p_get_pages -- error -22 failed while calling"],
    "gpudirect-too-far": ["NCCL INFO GPU Direct RDMA Disabled for GPU 3 / HCA 0 (distance 7 > 5)"],
    "retry-exceeded": [
        "NCCL WARN NET/IB: Got completion from peer 10.0.0.7<40000> with status=12 opcode=0 len=0 vendor err 129",
        "E0610 worker_pool.cpp:263] Worker: Process failed for slice: transport retry counter exceeded",
    ],
    "queue-pairs-used-up": ["E0610 rdma_endpoint.cpp:88] Failed to create QP: Cannot allocate memory [12]"],
    "iommu": ['NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!'],
    "no-peer-access": ["RuntimeError: CUDA error: peer access is not supported between these two devices"],
    "exclusive-gpu": [
        "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    ],
    "gpu-not-visible": ["RuntimeError: CUDA error: invalid device ordinal", "RuntimeError: No CUDA GPUs are available"],
    "ipc-open-failed": [
        "cuda_ipc_cache.c:229 UCX ERROR cuIpcOpenMemHandle(&mapped, key->ph) failed: invalid device context",
        "cudaIpcOpenMemHandle returned invalid argument",
    ],
    "expandable-segments": ["cuda_ipc: memory comes from expandable segments, which do not support IPC"],
    "mig": ["NCCL WARN NCCL does not support MIG devices with more than one slice"],
    "fabric-down": ["RuntimeError: CUDA error: system not yet initialized"],
    "fabric-manager-version": [
        "fabric manager NVIDIA GPU driver interface version 550.54.15 don't match with driver version 550.90.07."
    ],
    "nvlinks-inactive": ["Unable to retrieve NVLink information as all links are inActive"],
    "imex": ["RuntimeError: No IMEX channel is available in this container"],
    "gpu-lost": [
        "Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error",
        "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    ],
    "gpu-hangs": [
        "NVRM: Xid (PCI:0000:9b:00): 119, pid=4242, name=python, Timeout after 6s of waiting for RPC response from GPU0"
    ],
    "driver-too-old": [
        "CUDA error 804: forward compatibility was attempted on non supported HW",
        "CUDA driver version is insufficient for CUDA runtime version",
    ],
    "gpu-memory-errors": [
        "NVRM: Xid (PCI:0000:1b:00): 64, pid=1, Row Remapper: error",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ],
    "gpu-out-of-memory": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
    "wrong-kernels": ["RuntimeError: CUDA error: no kernel image is available for execution on the device"],
    "nic-matrix-capped": ["140 NICs found in the topology, only displaying 63 in the matrix."],
    "tcp-gpu-memory": [
        "E0610 08:15:01.7 tcp_transport.cpp:153] Session::writeBody failed. Error: Bad address (value: 14)",
        "Session::writeBody failed. Error: Bad address",
    ],
    "tcp-peer-ended": ["E0610 tcp_transport.cpp:117] Session::readBody failed. Error: End of file (value: 2)"],
    "kv-chunk-lost": [
        "[2025-06-10 08:15:01] Failed to send kv chunk of 7343 to 127.0.0.1:9999",
        "Decode handshake: Failed to get kvcache from prefill instance, it might be dead",
        "KVTransferError(bootstrap_room=77): transfer aborted",
        "prefill-0 | 10:00:00.000 warning engine.worker: copy of transfer 7 to decode-0 failed: the link has ended",
    ],
    "native-crash": ["Fatal Python error: Segmentation fault", "worker exited with code -11", "exit code 139"],
    "cuda-library-missing": ["ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"],
    "no-driver": [
        "OSError: libcuda.so.1: cannot open shared object file: No such file or directory",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
    ],
    "illegal-gpu-access": ["torch.AcceleratorError: CUDA error: an illegal memory access was encountered"],
    "nccl-failed": ["RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"],
    "huge-pages-missing": ["mmap with MAP_HUGETLB failed: Cannot allocate memory"],
    "fallback-to-tcp": ["W0610 multi_transport.cpp:40] RDMA init failed, falling back to TCP transport"],
    "ucx-unreachable": ["select.c:631 UCX ERROR no active messages transport to node2:99: Destination is unreachable"],
    "nixl-backend": ["nixl._bindings.nixlBackendError: NIXL_ERR_BACKEND"],
    "route-none": ["RouteUnavailable: no transport serves this pair of workers. shm: the peer runs on another machine"],
    "preflight-wrong-bytes": ["not cuda_ipc: the preflight's bytes did not arrive as sent: 4096 bytes differ"],
    "layouts-differ": [
        "KV layouts differ: prefill-0 has page_tokens=16; decode-0 has page_tokens=64. Start both with the same model"
    ],
    "page-size-differs": ["ValueError: page size mismatch: prefill has 64, decode has 1"],
    "kv-dtype-differs": ["RuntimeError: kv_cache_dtype mismatch between prefill (fp8_e5m2) and decode (auto)"],
    "tensor-parallel-differs": ["AssertionError: PD with different TP sizes per DP rank is not supported"],
    "compatibility-hash": ["RuntimeError: NIXL compatibility hash mismatch. Local: ab12, Remote: cd34"],
    "protocol-differs": ["refused 127.0.0.1:9: protocol version differs: this worker speaks 3, w speaks 2."],
    "worker-lost": [
        "prefill-0 | 20:34:14.038 warning engine.peers: decode worker lost: 127.0.0.1:45751 closed the connection",
        "no route to 127.0.0.1:45751: cannot reach the decode worker at 127.0.0.1:45751: Connect call failed",
    ],
    "first-request-slow": ["Request 77 timed out after 300.0s in KVPoll.Bootstrapping"],
    "prefill-not-there": ["Could not fetch prefill parallel info from bootstrap_addr: 10.0.0.5:8998"],
    "ephemeral-ports": ["connect: Cannot assign requested address"],
    "loopback-rendezvous": [
        "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error"
    ],
    "no-interface": ["NCCL WARN Bootstrap : no socket interface found"],
    "duplicate-gpu": ["NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"],
    "firewall": ["NCCL WARN socketStartConnect: Connect to 10.0.0.7<43210> failed : Connection timed out"],
    "collective-timeout": ["[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"],
    "nccl-system-error": ["NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"],
    "side-channel-port": ["zmq: NIXL side channel tcp://*:5600: Address already in use"],
    "port-in-use": [
        "OSError: [Errno 98] Address already in use",
        "error: port 8000 on 127.0.0.1 is in use by another program. Choose another with --port",
    ],
    "peer-address-wrong": ["ConnectionError: 172.17.0.2:8998: Connection refused"],
    "proxy": ["requests.exceptions.ProxyError: HTTPConnectionPool(host='10.1.1.1', port=3128)"],
    "pool-too-small": [
        "error: a KV pool of 9 tokens needs 9.00 GiB, 2.00 GiB are available: 7.00 GiB are missing. Lower --kv-tokens",
        "error: the KV pool needs 90.00 GiB on GPU-1, of whose 80.00 GiB 79.00 are free (out of memory). Lower",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    ],
    "model-incomplete": [
        "error: ./m is incomplete: model.safetensors.index.json names 2 shards, missing: b.safetensors.",
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    ],
    "hub-unreachable": ["error: no model 'a/b': ... and the hub cannot be reached (ConnectError)."],
    "extra-missing": [
        "error: the package 'nixl' is not installed; install it with: pip install 'slipstream[nixl]'",
    ],
    "engine-failed": ["10:00:00.000 error engine.loop: the engine failed; this worker ends"],
    "worker-hung": [
        "10:00:00.000 error engine.guard: this worker hangs: decode step 7 (3 sequences, 3 tokens) has not ended for "
        "121 s (--step-timeout-s 120).",
        "10:00:01.000 warning launch.supervise: p (pid 7) ended with exit code 71: it hung, and says above where",
        "decode-0 (pid 8) was ended by SIGALRM: it was stopped by a signal for too long, or hung in native code that",
    ],
    "rank-silent": [
        "this worker hangs: rank 1 (pid 7, stopped by a signal) has not shown a sign of life for 121 s",
        "slipstream.run.parallel.OutOfStep: another rank of this worker has been silent for 60 s",
        "RingBroken: rank 1 of this worker has taken no orders for 60 s",
    ],
    "worker-silent": [
        "10:00:00.000 warning router.fleet: decode-0 lost: it has answered none of 30 heartbeats (worker_silence_s)",
        "decode-0 (pid 7) has answered nothing for 60 s (worker_silence_s, twice); it is asked where its threads are",
    ],
    "copy-stuck": [
        "decode worker lost: a copy to decode-0 (http://127.0.0.1:7) has not ended for 120 s (--step-timeout-s)",
        "a copy over the routes 8a/1 runs on 5 s after their link has ended; its pages stay taken, its request",
        "this worker hangs: a copy over the routes 8a/1 of a lost peer runs on for 121 s",
    ],
    "keeps-ending": ["error: decode-0 ended 5 times in a row soon after its start; the last time it exited with 1"],
}

HEALTHY = """\
router    | 20:00:04.505 launch.router_process: router listens at http://127.0.0.1:18733
decode-0  | 20:00:13.541 launch.worker_process: loading smollm2: 64 %
decode-0  | 20:00:15.708 launch.worker_process: decode-0 is ready after 6.2 s: role decode, smollm2 on cpu (x86_64)
router    | 20:00:15.728 router.fleet: decode-0 linked: http://127.0.0.1:40575, role decode, cpu (x86_64), pid 18613
prefill-0 | 20:00:15.989 engine.peers: route to decode-0: shm, 3.4 GB/s, 266 us; not local: the peer is another process
not cuda_ipc: here: cuda_ipc moves memory of GPUs; the KV pool of this rank is on the CPU
router    | 20:00:18.223 front.server: SIGTERM received
router    | 20:00:18.408 router.fleet: decode-0 lost: it was removed from the router
prefill-0 | 20:00:18.409 engine.server: router router-5582 gone: closed the connection (IncompleteReadError)
prefill-0 | 20:00:18.566 launch.worker_process: SIGTERM: finishing what is under way (at most 30 s)
20:00:20.199 launch.cluster: all processes have ended
"""

NEAR_MISSES = [
    "NVRM: Xid (PCI:0000:79:00): 31, pid=79, MMU Fault",
    "NVRM: Xid (PCI:0000:1b:00): 790, something else",
    "pcieport 0000:00:01.0: PCIe Bus Error: severity=Corrected, type=Physical Layer",
    "engine state: Initializing",
    "process exited with exit code 13",
    "process exited with exit code 1370",
    "worker exited with code -90",
    "NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.5<0>",
    "NCCL INFO GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",
    "Found 8 HCAs.",
    "I0610 Session::writeBody finished, 4096 bytes",
    "Sent kv chunk of request 7",
    "libcudart.so.12 => /usr/local/cuda/lib64/libcudart.so.12",
    "10.172.17.0:8000 Connection refused",
    "Got completion from peer 10.0.0.7<40000> with status=0",
    "page size: 16, kv_cache_dtype: auto, tp_size: 2",
    "interface version 550.54.15 matches the driver",
    "open files: 1024, address in use: none",
    "CUDA memory: out of 80 GiB 12 are used",
    "http_proxy is not set",
    "set_mempolicy works",
]

BY_ID = {row.id: row for row in CATALOGUE}
SECOND_MACHINE = [
    "W0610 08:13:22.1 topology.cpp:42] No RDMA devices found, check your device installation",
    "I0610 08:13:22.4 transfer_engine.cpp:70] install TCP transport",
    *LINES["tcp-gpu-memory"],
    *LINES["tcp-peer-ended"],
    "Failed to send kv chunk of 7343 to 127.0.0.1:9999",
    "Failed to get kvcache from prefill instance, it might be dead",
    'INFO:     127.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
]


def ids(*lines: str) -> set[str]:
    return {finding.id for finding in log.read(lines).findings}


@pytest.mark.parametrize(
    ("row", "line"), [(row, line) for row, lines in LINES.items() for line in lines], ids=lambda text: text[:40]
)
def test_a_line_as_it_is_printed_names_its_failure(row: str, line: str):
    assert row in ids(line)


def test_every_row_with_patterns_has_a_line_here():
    assert {row.id for row in CATALOGUE if row.patterns} == set(LINES)


def test_at_least_eighty_failures_are_recognised_and_each_is_complete():
    known = {check.id for check in CHECKS}
    assert len(CATALOGUE) >= 80
    assert len(BY_ID) == len(CATALOGUE)
    for row in CATALOGUE:
        assert row.patterns or row.checks, row.id
        assert row.cause, row.id
        assert all(row.remedies), row.id
        assert set(row.checks) <= known, row.id
        assert set(row.effect_of) <= set(BY_ID), row.id


@pytest.mark.parametrize("line", NEAR_MISSES)
def test_a_line_that_only_looks_alike_names_nothing(line: str):
    assert ids(line) == set()


def test_a_healthy_log_of_slipstream_has_no_finding():
    assert ids(*HEALTHY.splitlines()) == set()


def test_the_second_machine_is_told_why_and_what_to_do():
    report = log.read(SECOND_MACHINE)
    root = next(finding for finding in report.findings if finding.id == "tcp-gpu-memory")
    assert root.because == ()
    assert (root.line, root.count) == (3, 2)
    assert "TCP" in root.cause
    assert "GPU memory" in root.cause
    assert len(root.remedies) == 3
    effects = {finding.id for finding in report.findings if finding.because == ("tcp-gpu-memory",)}
    assert effects == {"tcp-peer-ended", "kv-chunk-lost"}
    shown = log.text(report, "server.log")
    assert shown.count("remedy:") == 6  # three of this one, three of the missing devices
    assert shown.index("[tcp-gpu-memory]") < shown.index("[kv-chunk-lost]")


def test_a_lost_chunk_alone_is_named_as_itself():
    (finding,) = log.read(["Failed to send kv chunk of 7343"]).findings
    assert (finding.id, finding.because) == ("kv-chunk-lost", ())


def test_effects_lead_to_the_first_cause_and_circles_end():
    rows = [
        symptom("a", "A", "aaa", cause="c", remedies="r", effect_of=("b",)),
        symptom("b", "B", "bbb", cause="c", remedies="r", effect_of=("c",)),
        symptom("c", "C", "ccc", cause="c", remedies="r"),
        symptom("x", "X", "xxx", cause="c", remedies="r", effect_of=("y",)),
        symptom("y", "Y", "yyy", cause="c", remedies="r", effect_of=("x",)),
    ]
    found = {finding.id: finding.because for finding in log.read(["aaa", "bbb", "ccc", "xxx", "yyy"], rows).findings}
    assert (found["a"], found["b"], found["c"]) == (("c",), ("c",), ())
    assert set(found) == {"a", "b", "c", "x", "y"}


def test_a_socket_network_is_only_a_notice():
    report = log.read(LINES["socket-fallback"])
    assert [finding.notice for finding in report.findings] == [True]
    assert report.failures == []


def test_colours_case_and_spacing_do_not_hide_a_line():
    assert ids("\x1b[31mERROR\x1b[0m   TOO  many\topen files") == {"open-files"}


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter("decode-0")], ids=["text", "json"])
def test_both_forms_of_slipstreams_own_lines_are_read(formatter: logging.Formatter):
    record = logging.makeLogRecord({"name": "slipstream.x", "levelname": "ERROR", "levelno": 40, "msg": "%s"})
    record.args = ("the engine failed; this worker ends",)
    assert ids(formatter.format(record)) == {"engine-failed"}


def test_a_pattern_knows_numbers_words_and_gaps():
    found = pattern("Xid (PCI:{w}): 79")
    assert found.matches("nvrm: xid (pci:0000:1b:00): 79, pid")
    assert not found.matches("xid (pci:0000:1b:00): 790")
    assert pattern("A {n} long part ... c").matches("a 12 long part and then c")
    assert pattern("A {n} long part ... c").needle == " long part"


def test_long_lines_and_many_lines_are_read_quickly_enough_to_finish():
    lines = ["x" * 100_000, *("10:00:00.000 info router: request 7 took 12 ms" for _ in range(20_000))]
    assert log.read(lines).lines == 20_001


def run(*arguments: str, stdin: str = ""):
    return CliRunner().invoke(cli, ["doctor", *arguments], input=stdin, prog_name="slipstream")


def test_the_command_reads_a_file_and_ends_with_one(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes("\n".join(SECOND_MACHINE).encode() + b"\n\xff\xfe not text\n")
    result = run("--log", str(path))
    assert result.exit_code == 1
    assert "The TCP transport was given GPU memory" in result.output


def test_the_command_reads_standard_input_as_json_too():
    result = run("--log", "-", "--json", stdin="Too many open files\n")
    report = json.loads(result.output)
    assert [finding["id"] for finding in report["findings"]] == ["open-files"]
    assert result.exit_code == 1


OWN_WORDS = (
    "no transport serves this pair of workers",
    "which was asked for, does not serve this pair of workers",
    "the preflight's bytes did not arrive as sent",
    "KV layouts differ:",
    "KV layout differs:",
    "protocol version differs:",
    "is in use by another program",
    "is in use by another slipstream",
    "the engine failed; this worker ends",
    "times in a row soon after its start",
    "are missing. Lower --kv-tokens",
    "before any weight is there. Lower --kv-tokens",
    "too little for a KV pool: one page",
    "has a config.json but no *.safetensors",
    "is no GGUF file: it starts with",
    "holds neither config.json nor a .gguf file",
    "is gated: accept its terms",
    "was ended by ",
    "decode worker lost:",
    "cannot reach the decode worker at",
)


@pytest.mark.parametrize("words", OWN_WORDS)
def test_what_the_catalogue_takes_for_slipstreams_own_words_is_still_said(words: str):
    source = Path(log.__file__).parents[1]
    said = [path for path in source.rglob("*.py") if "doctor" not in path.parts and words in path.read_text()]
    assert said
    assert any(words.strip() in text for row in CATALOGUE for text in row.texts)


def test_a_killed_worker_explains_that_it_is_lost():
    from slipstream.launch.supervise import ended_how

    lost = LINES["worker-lost"][0]
    found = {finding.id: finding.because for finding in log.read([f"decode-0 (pid 7) {ended_how(-9)}", lost]).findings}
    assert found == {"killed-for-memory": (), "worker-lost": ("killed-for-memory",)}
    assert ids(f"decode-0 (pid 7) {ended_how(-11)}") == {"native-crash"}
    assert ids(f"decode-0 (pid 7) {ended_how(1)}") == set()


def test_a_clean_log_ends_with_zero_and_a_missing_one_is_an_error():
    assert run("--log", "-", stdin=HEALTHY).exit_code == 0
    assert "cannot read /no/such.log" in str(run("--log", "/no/such.log").exception)


def test_notices_alone_end_with_zero():
    assert run("--log", "-", stdin=LINES["socket-fallback"][0]).exit_code == 0


def test_rows_without_patterns_are_seen_by_checks():
    silent: list[Symptom] = [row for row in CATALOGUE if not row.patterns]
    assert silent
    assert all(row.checks for row in silent)
    assert log.read(io.StringIO("")).lines == 0
