"""The command line, as a user types it: each test runs the real command in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from slipstream.cli import generate
from slipstream.cli.main import cli
from slipstream.launch.devices import this_machine
from slipstream.transfer.transports import missing_package
from slipstream.version import __version__


def slipstream(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slipstream", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
    )


def test_help_names_all_commands():
    result = slipstream("--help")
    assert result.returncode == 0
    for name in ("serve", "worker", "router", "generate", "version"):
        assert f"\n  {name} " in result.stdout


@pytest.mark.parametrize("command", ["serve", "worker", "router", "generate"])
def test_help_of_a_command_describes_each_of_its_settings(command: str):
    from slipstream import settings

    scope = {
        "serve": settings.SERVE,
        "worker": settings.WORKER,
        "router": settings.ROUTER,
        "generate": settings.OFFLINE,
    }[command]
    result = slipstream(command, "--help", COLUMNS="400")
    assert result.returncode == 0
    for setting in scope:
        assert setting.flag in result.stdout
    assert "-fd" not in result.stdout  # what only the supervisor says to its children


def test_version():
    assert slipstream("--version").stdout.strip() == f"slipstream {__version__}"
    assert "torch" in slipstream("version").stdout


def test_no_command_shows_the_help():
    assert "Commands:" in slipstream().stderr + slipstream().stdout


def test_a_model_without_a_command_is_served():
    result = slipstream("smollm2", "--page-tokens", "0")
    assert result.returncode == 2
    assert result.stderr == "error: --page-tokens: 0 is not possible; it takes a whole number from 1 to 1024.\n"


def test_a_misspelt_command_is_not_taken_for_a_model():
    result = slipstream("sevre")
    assert result.returncode == 2
    assert "did you mean 'serve'?" in result.stderr


def test_a_misspelt_flag_is_refused_with_the_nearest():
    result = slipstream("serve", "--page-token", "16")
    assert result.returncode == 2
    assert "--page-tokens" in result.stderr


@pytest.mark.parametrize("command", ["serve", "worker", "generate"])
def test_an_unknown_model_is_one_sentence(command: str):
    prompt = ["hello"] if command == "generate" else []
    result = slipstream(command, "./no/such/model", *prompt)
    assert result.returncode in (1, 2)
    assert result.stderr.count("error: ") == 1
    assert "no/such/model" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command in (["serve", "smollm2"], ["router"], ["worker", "smollm2"]):
            result = slipstream(*command, "--port", port)
            assert result.returncode == 2
            assert f"port {port} on 127.0.0.1 is in use" in result.stderr
            assert result.stderr.count("\n") == 1
        result = slipstream("worker", "smollm2", "--wire-port", port)
        assert result.returncode == 2
        assert "Choose another with --wire-port" in result.stderr


def test_a_host_that_is_not_here_is_one_sentence():
    result = slipstream("router", "--host", "192.0.2.1", "--port", "0")
    assert result.returncode == 2
    assert "192.0.2.1: this is no address of this machine" in result.stderr


def test_a_device_that_is_not_here_is_one_sentence():
    result = slipstream("serve", "smollm2", "--prefill", "cuda:9", "--decode", "1", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert "there is no cuda:9 on this machine" in result.stderr


def test_a_wrong_worker_address_is_one_sentence():
    result = slipstream("router", "--port", "0", "--prefill", "ftp://x")
    assert result.returncode == 2
    assert result.stderr.startswith("error: 'ftp://x' is not a worker's address")
    assert result.stderr.count("\n") == 1


def test_an_interrupt_ends_a_command_with_130_and_without_a_word(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate.command, "callback", interrupted)
    result = CliRunner().invoke(cli, ["generate", "smollm2", "Hello"])
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize("command", [["serve"], ["worker"], ["generate", "smollm2", "Hello"]])
def test_ranks_that_cannot_share_the_model_are_refused_before_anything_is_started(command: list[str]):
    result = slipstream(*command, "--tp", "2", "--device", "cpu")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "9 heads, 3 KV heads" in result.stderr
    assert "--tp may be 1, 3 for it" in result.stderr


@pytest.mark.parametrize("command", [["serve"], ["worker"], ["generate", "smollm2", "Hello"]])
def test_a_context_that_the_model_has_not_is_refused_before_anything_is_started(command: list[str]):
    result = slipstream(*command, "--max-model-len", "100000", "--device", "cpu")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "error: max_model_len 100000 exceeds the 8192 positions of smollm2; lower --max-model-len.\n"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["handoff", "--cases", "foo"], "'foo' is not TOKENS"),
        (["handoff", "--layout", "foo"], "--layout 'foo'"),
        (["engine"], "bench engine measures GPUs; this machine has cpu"),
    ],
)
def test_a_benchmark_that_cannot_run_says_so_before_torch_is_imported(words: list[str], sentence: str):
    if words == ["engine"] and this_machine().gpus:
        pytest.skip("this machine has a GPU")
    code = (
        "import sys; from slipstream.cli.main import main\n"
        f"sys.argv[1:] = ['bench', *{words!r}]\n"
        "try: main()\nfinally: sys.stderr.write('torch' if 'torch' in sys.modules else 'light')"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert result.stderr.endswith("light")


@pytest.mark.parametrize("command", ["serve", "worker"])
@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_a_transport_without_its_package_is_refused_with_how_to_install_it(command: str, transport: str):
    if not missing_package(transport):
        pytest.skip(f"{transport} is installed here")
    result = slipstream(command, "--transport", transport, "--port", "0")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert f"pip install 'slipstream[{transport}]'" in result.stderr


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_transport_of_gpus_is_refused_where_all_workers_are_on_the_cpu(command: str):
    result = slipstream(command, "--transport", "cuda_ipc", "--device", "cpu", "--port", "0")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: --transport cuda_ipc moves memory of GPUs")


def test_a_model_given_twice_is_refused():
    result = slipstream("serve", "smollm2", "--model", "other")
    assert result.returncode == 2
    assert "given twice" in result.stderr


def test_an_unknown_variable_is_a_warning():
    result = slipstream("serve", "smollm2", "--prefill", "nowhere", SLIPSTREAM_PAGE_TOKEN="8")
    assert "warning: the environment variable SLIPSTREAM_PAGE_TOKEN is not known" in result.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--temperature", "50"], "temperature must be a number from 0 to 2; 50.0 was given."),
        (["--top-p", "0"], "top_p must be a number over 0, up to 1; 0.0 was given."),
        (["--max-tokens", "0"], "max_tokens must be at least 1; 0 was given."),
        (["--min-p", "nan"], "min_p must be a number from 0 to 1; nan was given."),
    ],
)
def test_sampling_out_of_bounds_is_refused_before_any_work(flags: list[str], sentence: str):
    result = slipstream("generate", "./no/such/model", "hello", *flags)
    assert (result.returncode, result.stderr) == (2, f"error: {sentence}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["topology", "--help"], "there is no command 'topology'; did you mean 'topo'?"),
        (["topology"], "there is no command 'topology'; did you mean 'topo'?"),
        (["flavour", "--help"], "there is no command 'flavour'; there are serve, worker, router"),
    ],
)
def test_a_word_that_is_no_command_does_not_show_the_help_of_serve(words: list[str], said: str):
    result = slipstream(*words)
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stdout == ""
