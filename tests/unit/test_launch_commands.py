"""What a cluster's processes are started with, and what is printed when they are ready."""

from __future__ import annotations

import io
import json
import shlex
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from rich.console import Console

from slipstream.config import EngineConfig, FrontConfig, LaunchConfig, RouterConfig, TransferConfig, WorkerConfig
from slipstream.errors import ConfigError
from slipstream.launch import banner
from slipstream.launch.banner import Member
from slipstream.launch.commands import ClusterConfig, router_spec, threads_each, with_port, worker_specs
from slipstream.launch.devices import Gpu, Machine
from slipstream.launch.display import Display
from slipstream.launch.spec import place
from slipstream.listen import listen, url_of
from slipstream.settings import ROUTER, WORKER, resolve
from slipstream.wire import RouteReport

SECRET = "s3cret"


def config(**changes) -> ClusterConfig:
    parts = {
        "engine": EngineConfig(model="/models/m", page_tokens=32),
        "transfer": TransferConfig(transport="tcp"),
        "worker": WorkerConfig(),
        "router": RouterConfig(resubmissions=2),
        "front": FrontConfig(api_key=SECRET, log_format="json", port=0),
        "launch": LaunchConfig(drain_s=7.0),
    }
    return ClusterConfig(**{**parts, **changes})


def flags_of(argv, scope) -> dict[str, object]:
    """The settings that a child reads from its command line."""
    words = list(argv)[list(argv).index("slipstream") + 2 :]
    flags: dict[str, object] = {}
    while words:
        word = words.pop(0)
        name = word.removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in scope:
            flags[name] = words.pop(0)
    return flags


def test_workers_are_told_what_serve_was_told():
    machine = Machine(cores=8)
    specs = worker_specs(
        config(), place(machine, "1", "3", ""), machine, router_url="http://127.0.0.1:8000", parent_fd=9
    )
    assert list(specs) == ["prefill-0", "decode-0", "decode-1", "decode-2"]
    argv = specs["decode-1"].argv
    resolved = resolve(WORKER, flags_of(argv, WORKER), environment={})
    worker, engine = resolved.config(WorkerConfig), resolved.config(EngineConfig)
    assert (worker.role, worker.name, worker.join) == ("decode", "decode-1", "http://127.0.0.1:8000")
    assert (engine.page_tokens, engine.device, engine.threads) == (32, "cpu", 2)
    assert "/models/m" in argv
    assert resolved.config(TransferConfig) == TransferConfig(transport="tcp")
    assert resolved.config(FrontConfig).log_format == "json"
    assert resolved.config(LaunchConfig).drain_s == 7.0
    assert argv[-2:] == ["--parent-fd", "9"]


def test_workers_that_share_a_gpu_share_its_memory():
    machine = Machine(cores=8, gpus=(Gpu(0, "GPU-0", "H200", 1), Gpu(1, "GPU-1", "H200", 1)))
    specs = worker_specs(config(), place(machine, "", "", "2xcuda:0,cuda:1"), machine, router_url="", parent_fd=9)
    fractions = [
        resolve(WORKER, flags_of(spec.argv, WORKER), environment={}).config(EngineConfig).mem_fraction
        for spec in specs.values()
    ]
    assert fractions == [0.44, 0.44, 0.88]


def test_the_router_gets_the_socket_and_its_settings():
    spec = router_spec(config(), port=8123, listen_fd=5, parent_fd=9)
    resolved = resolve(ROUTER, flags_of(spec.argv, ROUTER), environment={})
    assert resolved.config(RouterConfig).resubmissions == 2
    assert resolved.config(FrontConfig).port == 8123
    assert spec.fds == (5,)


def test_the_api_key_is_on_no_command_line():
    machine = Machine(cores=2)
    workers = worker_specs(config(), place(machine, "", "", ""), machine, router_url="", parent_fd=9)
    for spec in (router_spec(config(), port=1, listen_fd=5, parent_fd=9), *workers.values()):
        assert SECRET not in " ".join(spec.argv)
        assert spec.environment["SLIPSTREAM_API_KEY"] == SECRET


def test_children_do_not_inherit_settings_of_serve(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIPSTREAM_PREFILL", "2")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    spec = router_spec(config(), port=1, listen_fd=5, parent_fd=9)
    assert "SLIPSTREAM_PREFILL" not in spec.environment
    assert spec.environment["SOMETHING_ELSE"] == "1"


def test_a_worker_started_again_keeps_its_port():
    machine = Machine(cores=2)
    spec = worker_specs(config(), place(machine, "", "", ""), machine, router_url="", parent_fd=9)["decode-0"]
    assert flags_of(with_port(spec, 7001).argv, WORKER)["port"] == "7001"
    assert "--port" not in spec.argv


@pytest.mark.parametrize(("cores", "workers", "threads"), [(2, 1, 0), (2, 2, 1), (8, 3, 2), (2, 5, 1), (64, 2, 32)])
def test_cpu_workers_share_the_cores(cores: int, workers: int, threads: int):
    assert threads_each(cores, workers) == threads


def test_the_front_listens_where_it_was_told():
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)
    assert url_of("0.0.0.0", 8000) == "http://127.0.0.1:8000"
    assert url_of("::", 8000) == "http://[::1]:8000"
    assert url_of("10.0.0.7", 8000) == "http://10.0.0.7:8000"


class Greeter(BaseHTTPRequestHandler):
    """Answers as the front does."""

    answers: ClassVar = {"/health": b'{"status": "unavailable"}', "/version": b'{"version": "9.9"}'}

    def do_GET(self) -> None:
        body = self.answers.get(self.path, b"{}")
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Stranger(Greeter):
    answers: ClassVar = {"/version": b'{"version": "9.9"}'}


@pytest.mark.parametrize(
    ("handler", "words"),
    [(Greeter, r"another slipstream \(9\.9\), which serves http://127"), (Stranger, "another program")],
)
def test_of_a_port_in_use_it_is_said_whether_slipstream_has_it(
    handler: type[Greeter], words: str, monkeypatch: pytest.MonkeyPatch
):
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            monkeypatch.delenv("MAKELEVEL", raising=False)
            with pytest.raises(ConfigError, match=f"is in use by {words}") as caught:
                listen("127.0.0.1", server.server_port)
            assert "PORT=" not in caught.value.message
            monkeypatch.setenv("MAKELEVEL", "1")
            with pytest.raises(ConfigError, match=r"--port \(PORT=... behind make serve\)"):
                listen("127.0.0.1", server.server_port)
        finally:
            server.shutdown()


MEMBERS = [
    Member(
        url="http://127.0.0.1:7000",
        state="live",
        role="prefill",
        name="prefill-0",
        pid=11,
        devices=["cpu"],
        served_name="it's",
        max_model_len=2048,
        pages_total=100,
        routes=[
            RouteReport(peer="decode-0", transport="tcp", gb_per_s=3.21, latency_us=41.0, rejected={"shm": "not asked"})
        ],
    ),
    Member(
        url="http://127.0.0.1:7001",
        state="live",
        role="decode",
        name="decode-0",
        pid=12,
        devices=["cpu"],
        served_name="it's",
        max_model_len=1024,
        pages_total=50,
        problems=["decode-0 has a cold"],
    ),
]


def printed(members) -> str:
    return banner.banner(members, url="http://127.0.0.1:8000", page_tokens=16, seconds=3.0, router_pid=10)


def test_the_banner_says_who_runs_where_and_how_kv_travels():
    text = printed(MEMBERS)
    for word in (
        "it's is served",
        "context 1,024",
        "prefill-0",
        "decode-0",
        "11",
        "12",
        "1,600",
        "800",
        "router",
        "10",
    ):
        assert word in text
    assert "3.21 GB/s" in text
    assert "41 µs" in text
    assert "shm: not asked" in text
    assert "warning: decode-0: decode-0 has a cold" in text


def test_only_pairs_that_may_hand_over_are_shown():
    both = Member(url="http://127.0.0.1:7002", state="live", role="both", name="both-0")
    names = [(source.name, destination.name) for source, destination, _ in banner.pairs([*MEMBERS, both])]
    assert names == [("prefill-0", "decode-0"), ("prefill-0", "both-0"), ("both-0", "decode-0")]


def test_the_curl_line_survives_the_shell():
    words = shlex.split(banner.curl_line("http://127.0.0.1:8000", "it's"))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's"


def test_lines_of_children_are_prefixed_with_their_names():
    out = io.StringIO()
    display = Display(["router", "decode-0"], "text", table=False, console=Console(file=out, width=40, soft_wrap=True))
    display.line("router", "12:00:00.000 hello [bold]not markup[/bold]")
    display.line("decode-0", "x" * 60)
    assert out.getvalue().splitlines() == [
        "router   | 12:00:00.000 hello [bold]not markup[/bold]",
        "decode-0 | " + "x" * 60,
    ]


def test_json_lines_pass_and_others_are_wrapped(capsys: pytest.CaptureFixture[str]):
    display = Display(["router"], "json", table=True)
    display.line("router", '{"message": "hello"}')
    display.line("router", "Traceback (most recent call last):")
    first, second = capsys.readouterr().err.splitlines()
    assert json.loads(first) == {"message": "hello"}
    assert json.loads(second)["message"] == "Traceback (most recent call last):"
    assert json.loads(second)["process"] == "router"


def test_the_start_is_a_table_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    display = Display(["router", "decode-0"], "text", table=True, console=console)
    display.line("decode-0", "12:00:00.123 launch.worker: loading 40 %")
    display.line("router", "12:00:00.123 warning router.fleet: odd")
    display.ready()
    display.line("decode-0", "after")
    text = out.getvalue()
    assert "loading 40 %" in text
    assert "launch.worker" not in text
    assert "warning router.fleet: odd" in text
    assert "after" in text
