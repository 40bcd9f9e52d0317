"""`slipstream serve` and its parts as a user runs them: real processes, the bundled model or a tiny one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.proc.programs import LIMIT_S, SMALL, Program, Server, alive, serving, until, unused_shared_memory
from tests.unit.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random model; it is served under the folder's name."""
    return str(tiny_model(tmp_path_factory.mktemp("models") / "smollm2", tokenizer=True))


@pytest.fixture
def leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test nothing is left of what its programs put into shared memory and temporary files."""
    shared = set(os.listdir("/dev/shm"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    assert os.listdir(tmp_path) == []
    assert unused_shared_memory() <= shared


@pytest.fixture
def kept_port() -> Iterator[Callable[[], int]]:
    """Gives ports that are bound, though not listened on: a program that is told one can have it, nobody else can."""
    with contextlib.ExitStack() as kept:

        def port() -> int:
            sock = kept.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
            return sock.getsockname()[1]

        yield port


class Clusters:
    """Gives one cluster of `model` to test after test, and another when a test has ended it."""

    def __init__(self, model: str, kept: contextlib.ExitStack) -> None:
        self._model, self._kept = model, kept
        self._program: Program | None = None

    def sound(self) -> tuple[Program, Server]:
        if self._program is None or self._program.process.poll() is not None:
            self._program, self._server, _ = self._kept.enter_context(serving("--drain-s", "60", model=self._model))
        until(lambda: set(self._server.pids()) == {"prefill-0", "decode-0"} and self._server.ready(), "all are there")
        return self._program, self._server


@pytest.fixture(scope="module")
def clusters(tiny: str) -> Iterator[Clusters]:
    with contextlib.ExitStack() as kept:
        yield Clusters(tiny, kept)


@pytest.fixture
def cluster(clusters: Clusters) -> tuple[Program, Server]:
    """One that is ready; a test may harm and end it."""
    return clusters.sound()


def router_of(program: Program) -> int:
    """The pid of the router that was started with the cluster."""
    return int(program.says(r"(?m)^router +front +(\d+)")[1])


def children_of(pid: int) -> set[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return {int(word) for word in found.split()}


@pytest.mark.usefixtures("leaves_nothing")
def test_serve_answers_and_ctrl_c_leaves_nothing():
    with serving() as (program, server, pids):
        assert set(pids) == {"router", "prefill-0", "decode-0"}
        assert "Paris" in server.complete()
        assert re.search(r"prefill-0 -> decode-0 +shm +[\d.]+ GB/s +\d+ µs", program.output), program.output
        program.process.send_signal(signal.SIGINT)
        assert program.ends() == 0
        assert not any(alive(pid) for pid in pids.values())
        assert "did not end in time" not in program.output
        with pytest.raises(OSError, match="refused"):
            server.get("/health")


def test_whoever_is_killed_comes_back_and_the_next_request_is_answered(cluster: tuple[Program, Server]):
    program, server = cluster
    expected = server.complete()
    pids = {"router": router_of(program), **server.pids()}
    for name in ("prefill-0", "decode-0", "router"):
        os.kill(pids[name], signal.SIGKILL)
        assert server.complete() == expected  # a connection made now waits, a request is placed on who is left
        until(lambda old=pids[name]: old not in server.pids().values(), f"the end of {name} is seen")
        until(lambda: set(server.pids()) == {"prefill-0", "decode-0"} and server.ready(), f"{name} is back")
        assert server.complete() == expected
    assert set(server.pids().values()).isdisjoint({pids["prefill-0"], pids["decode-0"]})
    for worker in server.get("/workers")[1]["workers"]:
        with urllib.request.urlopen(worker["url"] + "/audit", timeout=LIMIT_S) as answer:
            assert json.loads(answer.read())["problems"] == []
    assert len(server.get("/workers")[1]["workers"]) == 2


def test_an_address_that_a_worker_has_left_is_withdrawn_from_a_router_that_was_started_again_with_it(
    cluster: tuple[Program, Server],
):
    program, server = cluster
    first = router_of(program)
    if alive(first):
        os.kill(first, signal.SIGKILL)
        until(lambda: "router-" in program.output and server.ready() and len(server.pids()) == 2, "the router is back")
    before = {worker["url"] for worker in server.get("/workers")[1]["workers"]}

    def live() -> set[str]:
        return {w["url"] for w in server.get("/workers")[1]["workers"] if w["state"] == "live"}

    for _ in range(2):  # behind the second end within a short time it gets another port
        pid = server.pids()["prefill-0"]
        os.kill(pid, signal.SIGKILL)
        until(lambda old=pid: server.pids().get("prefill-0", old) != old, "prefill-0 is back")
        if live() - before:
            break
    assert len(live() - before) == 1
    until(lambda: [w["state"] for w in server.get("/workers")[1]["workers"]] == ["live"] * 2, "nobody is waited for")
    assert server.complete()
    assert program.process.poll() is None


def test_a_stream_under_way_is_finished_before_the_end_of_a_cluster_whatever_it_has_been_through(
    cluster: tuple[Program, Server],
):
    program, server = cluster
    body = {"model": "smollm2", "prompt": "Count:", "max_tokens": 200, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        lines = [answer.readline()]
        program.process.send_signal(signal.SIGTERM)
        until(lambda: "ending: requests under way" in program.output, "the end has begun")
        lines += answer.readlines()
    events = [line for line in lines if line.startswith(b"data: ")]
    assert events[-1].strip() == b"data: [DONE]"
    assert b"error" not in b"".join(events)
    assert program.ends() == 0


@pytest.mark.usefixtures("leaves_nothing")
def test_one_decoder_more_is_asked_for_by_one_flag_and_nothing_outlives_a_supervisor_that_is_killed(tiny: str):
    with serving("--decode", "2", model=tiny) as (program, server, pids):
        assert set(pids) == {"router", "prefill-0", "decode-0", "decode-1"}
        assert server.ready()
        assert children_of(program.process.pid) == set(pids.values())
        program.process.kill()
        program.process.wait()
        until(lambda: not any(alive(pid) for pid in pids.values()), "the children have ended")


def test_ctrl_c_while_the_model_loads_ends_at_once():
    program = Program("serve", "smollm2", "--port", "0", *SMALL)
    program.says("loading smollm2")
    pids = children_of(program.process.pid)
    program.process.send_signal(signal.SIGINT)
    assert program.ends() == 0
    assert not any(alive(pid) for pid in pids)


def test_a_worker_that_cannot_start_ends_serve_with_its_sentence(tiny: str):
    program = Program("serve", tiny, "--port", "0", "--prefill", "1", "--decode", "1", "--kv-tokens", str(1 << 40))
    assert program.ends() in (1, 2)
    last = program.output.strip().splitlines()[-1]
    assert re.match(r"error: (prefill|decode)-0: a KV pool of 1099511627776 tokens needs [\d,.]+ GiB", last)
    assert program.output.count("error: ") == 1, "two workers refuse for one reason"
    assert "Traceback" not in program.output


def test_a_transport_that_serves_no_pair_ends_serve_with_its_reason(tiny: str):
    program = Program("serve", tiny, "--port", "0", *SMALL, "--transport", "local")
    assert program.ends(LIMIT_S) == 1
    last = program.output.strip().splitlines()[-1]
    assert last.startswith("error: no request can be served")
    assert "'local'" in last
    assert "did not end in time" not in program.output  # the others are healthy and end in their own way
    assert program.output.count("prefill worker gone") == 1  # it tries again, which is not said again


def test_a_model_without_a_usable_tokenizer_starts_nothing(tmp_path: Path):
    folder = tiny_model(tmp_path / "m", tokenizer=True)
    (folder / "chat_template.jinja").write_text("{% for %}")
    for words in ("the chat template is not valid", "has no tokenizer.json"):
        program = Program("serve", str(folder), "--port", "0", *SMALL)
        assert program.ends(LIMIT_S) == 1
        assert program.output.startswith("error: ")
        assert words in program.output
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        (folder / "tokenizer.json").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def guarded(tiny: str) -> Iterator[Program]:
    """A cluster with an API key, and with JSON logs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_API_KEY", "s3cret")
        program = Program("serve", tiny, "--port", "0", *SMALL, "--log-format", "json")
    try:
        yield program
    finally:
        print(program.output)
        program.process.terminate()
        program.ends()


def event_of_readiness(program: Program) -> dict[str, Any]:
    return json.loads(program.says(r'(?m)^\{.*"message":"ready".*\}$')[0])


def test_with_json_logs_one_event_says_that_it_is_ready_and_for_what(guarded: Program):
    event = event_of_readiness(guarded)
    assert event["model"] == "smollm2"
    assert 0 < event["context"] <= 1024
    assert event["workers"] == 2
    assert Server(event["url"]).ready()


def test_a_cluster_with_an_api_key_comes_together_and_asks_for_it(guarded: Program):
    server = Server(event_of_readiness(guarded)["url"])
    assert server.get("/workers")[0] == 401
    request = urllib.request.Request(server.url + "/workers", headers={"authorization": "Bearer s3cret"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert {worker["name"] for worker in json.loads(answer.read())["workers"]} == {"prefill-0", "decode-0"}
    command_lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children_of(guarded.process.pid)]
    assert len(command_lines) == 3
    assert not any("s3cret" in line for line in command_lines)


def alarms(output: str) -> list[str]:
    """Lines that look like trouble."""
    return re.findall(r"(?im)^.*\b(?:warning|error|critical|traceback|exception|errno|lost|refused)\b.*$", output)


def test_an_ordinary_start_and_an_ordinary_end_say_nothing_that_looks_like_trouble(tiny: str):
    with serving("--prefill", "2", "--decode", "2", model=tiny) as (program, server, pids):
        assert server.complete()
        assert len(pids) == 5
        program.process.send_signal(signal.SIGINT)
        assert program.ends() == 0
        assert "all processes have ended" in program.output
        assert alarms(program.output) == []
        ending = program.output[program.output.index("ending: requests under way") :]
        assert "closed the connection" not in ending, ending


@pytest.mark.parametrize("end", [("router", "p", "d"), ("d", "p", "router")])
def test_pieces_that_start_and_end_one_by_one_say_nothing_that_looks_like_trouble(
    tiny: str, end: tuple[str, ...], kept_port: Callable[[], int]
):
    ports = {name: kept_port() for name in ("router", "p", "d")}
    p, d = (f"http://127.0.0.1:{ports[name]}" for name in ("p", "d"))
    server = Server(f"http://127.0.0.1:{ports['router']}")
    commands = {"router": ["router", "--port", str(ports["router"]), "--prefill", p, "--decode", d]}
    for name, role in (("p", "prefill"), ("d", "decode")):
        port = ["--port", str(ports[name])]
        commands[name] = ["worker", tiny, "--role", role, "--name", name, *port, "--join", server.url, *SMALL]
    programs = {name: Program(*command) for name, command in commands.items()}
    try:
        until(lambda: set(server.pids()) == {"p", "d"} and server.ready(), "both workers are linked")
        assert server.complete()
        for name in end:
            programs[name].process.send_signal(signal.SIGINT)
            assert programs[name].ends() == 0
    finally:
        for program in programs.values():
            if program.process.poll() is None:
                program.process.kill()
                program.process.wait()
    assert {name: alarms(program.output) for name, program in programs.items()} == {"router": [], "p": [], "d": []}


def test_pieces_started_one_by_one_find_each_other_in_any_order(tiny: str, kept_port: Callable[[], int]):
    port = kept_port()
    url = f"http://127.0.0.1:{port}"
    server = Server(url)
    programs = [Program("worker", tiny, "--role", "decode", "--name", "d", "--join", url, *SMALL)]
    try:
        programs.append(Program("router", "--port", str(port)))
        programs.append(Program("worker", tiny, "--role", "prefill", "--name", "p", "--join", url, *SMALL))
        until(lambda: set(server.pids()) == {"p", "d"} and server.ready(), "both workers have joined")
        expected = server.complete()
        router = programs[1]
        router.process.kill()
        router.process.wait()
        programs[1] = Program("router", "--port", str(port))
        until(lambda: set(server.pids()) == {"p", "d"} and server.ready(), "both have joined again")
        assert server.complete() == expected
        for program in programs:
            program.process.terminate()
        assert [program.ends() for program in programs] == [0, 0, 0]
    finally:
        for program in programs:
            if program.process.poll() is None:
                program.process.kill()
                program.process.wait()


def test_generate_prints_the_answer():
    command = [sys.executable, "-m", "slipstream", "generate", "smollm2", "--raw", "The capital of France is"]
    options = ["--temperature", "0", "--max-tokens", "8", *SMALL]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert result.stderr.startswith("loading smollm2 ...\n")
