"""`slipstream doctor` on this machine, as typed, and in surroundings that are really wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit import doctor_systems as systems

from slipstream.cli.main import cli
from slipstream.doctor import case, docker, live, run
from slipstream.doctor.checks import CHECKS, GROUPS, active
from slipstream.doctor.elf import needed
from slipstream.doctor.system import Package, System
from slipstream.doctor.verdict import Check, Verdict

DOCUMENT = Path(__file__).parents[2] / "docs" / "doctor.md"
BY_ID = {item.id: item for item in CHECKS}
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
# what a machine that runs these tests may lack without being ill in a way that a test should complain of
MACHINE_OF_THE_TESTS = {"limits.memlock", "limits.killed", "limits.memory", "network.port"}


def doctor(*arguments: str, wrap: tuple[str, ...] = (), **changes: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and results by id of the real command with --json, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in PROXIES}
    environment |= changes.pop("environment", {})
    command = [*wrap, sys.executable, "-m", "slipstream", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, **changes)
    assert done.stdout, done.stderr
    return done.returncode, {result["id"]: result for result in json.loads(done.stdout)["results"]}


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["doctor", *arguments], prog_name="slipstream")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def bad(results: dict[str, Any]) -> set[str]:
    return {name for name, result in results.items() if result["status"] in ("warn", "fail")}


def test_this_machine_has_no_failure_and_everything_is_checked():
    code, results = doctor()
    assert bad(results) - MACHINE_OF_THE_TESTS == set()
    assert code == 0
    assert set(results) == {item.id for item in CHECKS if not item.active}
    assert not [name for name, result in results.items() if "check itself failed" in result.get("seen", "")]


def test_it_loads_no_torch_and_no_transformers():
    program = "import sys\nfrom slipstream.doctor import case, live, run, show\n"
    program += "run.diagnose(case.make(live.system(), case.Wish()), run.select((), False))\n"
    program += "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'huggingface_hub')))"
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0


def test_a_proxy_is_named_with_the_line_that_helps():
    code, results = doctor("--only", "network", environment={"http_proxy": "http://10.1.1.1:3128", "no_proxy": ""})
    assert results["network.proxy"]["status"] == "warn"
    assert "no_proxy=localhost,127.0.0.1" in results["network.proxy"]["remedy"]
    assert code == 0


def test_a_low_limit_of_locked_memory_is_named():
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    _, results = doctor("--only", "limits.memlock", preexec_fn=lower)
    assert results["limits.memlock"]["status"] == "warn"
    assert results["limits.memlock"]["seen"] == "64 KiB"


def test_a_broken_model_is_a_failure(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    code, results = doctor("--only", "config", "--model", str(tmp_path))
    assert code == 1
    assert bad(results) >= {"config.model"}
    assert "no *.safetensors" in results["config.model"]["seen"]


def namespaces() -> bool:
    tool = shutil.which("unshare")
    return bool(tool) and subprocess.run([str(tool), "-rmn", "true"], capture_output=True).returncode == 0


in_a_namespace = pytest.mark.skipif(not namespaces(), reason="this user may not make namespaces")

LOOPBACK_UP = """
import fcntl, socket, struct
with socket.socket() as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh14x", b"lo", 0x49))  # SIOCSIFFLAGS: up, loopback, running
"""


def inside(*steps: str) -> tuple[str, ...]:
    """A command's surroundings: namespaces of its own for files and network, in which these shell lines have run."""
    return ("unshare", "-rmn", "sh", "-c", " && ".join([*steps, 'exec "$@"']), "sh")


def python(program: str) -> str:
    return f"{sys.executable} -c {shlex.quote(program)}"


@in_a_namespace
def test_a_namespace_without_shared_memory_loopback_and_ports_is_named_rightly(tmp_path: Path):
    few = "echo '40000 40003' > /proc/sys/net/ipv4/ip_local_port_range"
    code, results = doctor(wrap=inside(f"mount --bind {tmp_path} /dev", few), stdin=subprocess.DEVNULL)
    assert code == 1
    assert bad(results) - MACHINE_OF_THE_TESTS == {
        "limits.shared-memory",
        "network.loopback",
        "network.free-ports",
    }
    assert results["network.free-ports"]["because"] == ["network.loopback"]
    assert "4 ports" in results["network.free-ports"]["seen"]


@in_a_namespace
def test_a_namespace_that_lacks_nothing_is_healthy():
    code, results = doctor(wrap=inside(python(LOOPBACK_UP)), stdin=subprocess.DEVNULL)
    assert bad(results) - MACHINE_OF_THE_TESTS == set()
    assert code == 0


@in_a_namespace
def test_without_shared_memory_that_alone_is_named(tmp_path: Path):
    wrap = inside(python(LOOPBACK_UP), f"mount --bind {tmp_path} /dev")
    _, results = doctor(wrap=wrap, stdin=subprocess.DEVNULL)
    assert bad(results) - MACHINE_OF_THE_TESTS == {"limits.shared-memory"}
    assert "/dev/shm" in results["limits.shared-memory"]["seen"]


@in_a_namespace
def test_a_range_of_ports_that_are_all_taken_is_a_failure_and_named_alone():
    """A firewall or a busy host: the range is there, and no port of it can be had."""
    few = "echo '40000 40003' > /proc/sys/net/ipv4/ip_local_port_range"
    take = "import os, socket, sys; s = [socket.create_server(('127.0.0.1', p)) for p in range(40000, 40004)]; "
    take += "[os.set_inheritable(x.fileno(), True) for x in s]; os.execvp(sys.argv[1], sys.argv[1:])"
    wrap = (*inside(python(LOOPBACK_UP), few), sys.executable, "-c", take)
    code, results = doctor(wrap=wrap, stdin=subprocess.DEVNULL, close_fds=False)
    assert code == 1
    assert bad(results) - MACHINE_OF_THE_TESTS == {"network.free-ports"}
    assert "in use" in results["network.free-ports"]["seen"]
    assert "ip_local_port_range" in results["network.free-ports"]["remedy"]


def test_each_single_trouble_is_named_alone(tmp_path: Path):
    """The whole diagnosis, one thing wrong at a time: nothing else is blamed."""

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    (tmp_path / "config.json").write_text("{}")
    known = {name for name in MACHINE_OF_THE_TESTS if name != "limits.memlock"}
    _, locked = doctor(preexec_fn=lower)
    assert bad(locked) - known == {"limits.memlock"}
    _, proxied = doctor(environment={"http_proxy": "http://10.1.1.1:3128", "no_proxy": "", "NO_PROXY": ""})
    assert bad(proxied) - MACHINE_OF_THE_TESTS == {"network.proxy"}
    code, broken = doctor("--model", str(tmp_path))
    assert code == 1
    assert "config.model" in bad(broken) - MACHINE_OF_THE_TESTS <= {"config.model", "config.tokenizer"}
    assert not broken["config.model"].get("because")


def test_the_text_says_what_was_seen_wanted_and_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://10.1.1.1:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    shown = invoke("--only", "network.proxy")
    for word in ("WARN  Local calls do not go to a proxy  [network.proxy]", "seen:", "wanted:", "why:", "remedy:"):
        assert word in shown
    assert "0 failed, 1 warned" in shown


def test_verbose_shows_every_check():
    shown = invoke("--verbose")
    assert all(f"[{item.id}]" in " ".join(shown.split()) for item in CHECKS if not item.active)


def test_an_unknown_check_is_refused_with_the_groups():
    result = CliRunner().invoke(cli, ["doctor", "--only", "nothing"])
    assert "groups are container, limits" in str(result.exception)


def test_checks_are_listed_as_text_and_json():
    assert "limits.memlock" in invoke("--list")
    assert {row["id"] for row in json.loads(invoke("--list", "--json"))} == set(BY_ID)


def test_two_commands_at_once_are_refused():
    assert "give one of them" in invoke("--docker", "--list")


# ---------------------------------------------------------------------------------------------- docker


def line(system: System) -> str:
    return docker.line(case.make(system, case.Wish()))


def test_a_cpu_machine_publishes_its_port_and_needs_no_privileges():
    shown = line(systems.cpu())
    assert "-p 8000:8000" in shown
    assert "--host 0.0.0.0" in shown
    assert "--gpus" not in shown
    assert "--cap-add" not in shown


def test_one_gpu_needs_room_in_shared_memory():
    shown = line(systems.gpu())
    assert "--gpus=all" in shown
    assert "--shm-size=16g" in shown
    assert "--ulimit=memlock=-1" in shown


def test_several_gpus_share_the_hosts_ipc_and_network():
    shown = line(systems.nvlink())
    assert "--ipc=host" in shown
    assert "--network=host" in shown
    assert "--host 0.0.0.0" not in shown
    assert "/dev/infiniband" not in shown


def test_usable_nics_bring_their_own_files_and_the_right_to_lock():
    shown = line(systems.rdma(systems.nic_files(state="1: DOWN")))
    assert "--device=/dev/infiniband/uverbs1" in shown
    assert "uverbs0" not in shown
    assert "--device=/dev/infiniband/rdma_cm" in shown
    assert "--cap-add=IPC_LOCK" in shown


def test_a_container_that_lacks_the_files_still_names_them():
    shown = line(systems.rdma(without="/dev/infiniband"))
    assert "--device=/dev/infiniband/uverbs0" in shown


def test_special_devices_are_passed_on():
    shown = line(systems.nvlink(2, {"/dev/gdrdrv": "", "/dev/nvidia-caps-imex-channels/channel0": "", **second_node()}))
    for flag in ("--device=/dev/gdrdrv", "channel0", "--cap-add=SYS_NICE"):
        assert flag in shown


def second_node() -> dict[str, str]:
    return {"/sys/devices/system/node/node1/cpulist": "8-15"}


def test_the_command_prints_the_line_with_reasons():
    shown = invoke("--docker")
    assert shown.startswith("docker run ")
    assert "Why:" in shown
    assert json.loads(invoke("--docker", "--json"))["command"].startswith("docker run ")


# ---------------------------------------------------------------------------------------------- active tests


def test_pages_really_move_between_two_processes():
    found = run.run(active.shm_copy, case.make(live.system(), case.Wish()))
    assert found.status == "ok", found.seen
    assert "verified" in found.seen


def test_a_copy_that_cannot_be_made_is_a_failure_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    rate, problem = active._copy("cuda_ipc", ("cpu", "cpu"), 20.0)
    assert rate == 0.0
    assert "cuda_ipc" in problem


@pytest.mark.parametrize("item", [item for item in CHECKS if item.active], ids=lambda item: item.id)
def test_active_tests_without_their_hardware_do_not_apply(item: Check):
    if item.id in ("active.shm-copy", "active.tcp-copy"):
        return
    assert run.run(item, case.make(systems.cpu(), case.Wish())).status == "not applicable"


def real(item: Check, system: System) -> Verdict:
    return run.run(item, case.make(system, case.Wish()))


def test_small_programs_really_ask_the_system():
    nixl = systems.packages({**systems.PACKAGES, "nixl": Package("nixl", "1.0.0")})
    assert real(active.cross_memory, systems.cpu(package=nixl)).status in ("ok", "warn")
    two_nodes = systems.cpu(systems.files(second_node()))
    assert real(active.memory_policy, two_nodes).status in ("ok", "warn")
    registered = real(active.registration, systems.rdma())  # mlx5_0 is only in the made-up machine
    assert registered.status in ("not checked", "warn")


# ---------------------------------------------------------------------------------------------- the live system


def test_needed_libraries_are_read_from_the_file(tmp_path: Path):
    import _ctypes

    found = needed(_ctypes.__file__ or sys.executable)
    assert found is None or any(name.startswith("lib") for name in found)
    assert needed(sys.executable) is not None
    text = tmp_path / "libx.so"
    text.write_text("no library")
    assert needed(str(text)) is None
    assert needed("/no/such/file") is None


def test_slow_calls_are_left_behind():
    import time

    assert live.within(0.05, lambda: time.sleep(5) or 1, 7) == 7
    assert live.within(60.0, lambda: 3, 7) == 3


def test_the_live_view_sees_this_process(tmp_path: Path):
    system = live.system()
    assert system.limits.keys() == {"memlock", "nofile", "nproc"}
    assert "127.0.0.1" in system.addresses["lo"]
    assert (system.package("click") or Package("", "")).version
    assert system.package("no-such-package-here") is None
    assert system.space("/no/such/folder") is None
    assert system.bind("127.0.0.1", 0) == ""
    assert system.bind("192.0.2.1", 0) != ""
    assert system.writable(str(tmp_path / "not" / "yet" / "there"))


# ---------------------------------------------------------------------------------------------- the page


def test_the_page_lists_every_check_in_order():
    rows = re.findall(r"^\| `([a-z]+\.[a-z0-9-]+)` \| (.+?) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(item.id, item.title) for item in CHECKS]
    assert all(title in DOCUMENT.read_text() for title in GROUPS.values())


def test_the_page_lists_every_known_failure():
    from slipstream.doctor.symptoms import CATALOGUE

    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \| (.+?) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert [(row[0], row[1]) for row in rows] == [(row.id, row.title) for row in CATALOGUE]
