"""`slipstream topo` and `slipstream bench`, as typed; routes of a cluster come from a real HTTP answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slipstream import asking
from slipstream.cli.main import cli
from slipstream.doctor import routes
from slipstream.errors import ConfigError, SlipstreamError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "topology"
SEED = [str(FIXTURES / name) for name in ("topo_pd_node_h800class_x8_nic32.txt", "pd_node_rdma_ports.txt")]
WORKERS = {
    "workers": [
        {
            "url": "http://127.0.0.1:7000",
            "state": "live",
            "role": "prefill",
            "name": "prefill-0",
            "routes": [
                {
                    "peer": "decode-0",
                    "transport": "shm",
                    "gb_per_s": 3.5,
                    "latency_us": 120.4,
                    "source_rank": 0,
                    "destination_rank": 0,
                    "rejected": {"local": "the peer is another process", "cuda_ipc": "here: no GPU", "tcp": "slower"},
                    "error": "",
                },
                {
                    "peer": "decode-1",
                    "transport": "none",
                    "error": "no transport serves this pair of workers. shm: refused",
                },
            ],
        },
        {"url": "http://127.0.0.1:7001", "state": "live", "role": "decode", "name": "decode-0"},
    ]
}


def slipstream(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, input=stdin, prog_name="slipstream")


def refused(*arguments: str) -> str:
    """The message of the error with which a command ends."""
    result = slipstream(*arguments)
    assert result.exit_code != 0
    if isinstance(result.exception, SlipstreamError):
        return result.exception.message
    return result.output


@pytest.fixture
def router() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("authorization") in ("Bearer secret", None)
            found = self.path == "/workers"
            self.send_response(200 if found and wanted else 404 if wanted else 401)
            self.end_headers()
            self.wfile.write(json.dumps(WORKERS if found else {}).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_this_machine_is_shown():
    result = slipstream("topo")
    assert result.exit_code == 0
    assert result.output.startswith("this system: ")


def test_several_files_follow_one_flag_and_flags_may_follow_them(tmp_path: Path):
    drawing = tmp_path / "machine.svg"
    result = slipstream("topo", "--from", *SEED, "--svg", str(drawing))
    assert "8 GPUs, 32 RDMA ports (4 active, 1 usable" in result.output
    assert drawing.read_text().startswith("<svg")


def test_a_snapshot_is_read_back(tmp_path: Path):
    saved = str(tmp_path / "machine.json")
    first = slipstream("topo", "--from", *SEED, "--save", saved, "--json")
    again = slipstream("topo", "--from", saved, "--json")
    assert json.loads(first.stdout)["machine"] == json.loads(again.output)["machine"]


def test_standard_input_is_a_file_too():
    result = slipstream("topo", "--from", "-", stdin=Path(SEED[0]).read_text())
    assert "8 GPUs" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["topo", "topo.txt"], "Files to read come after --from"),
        (["topo", "--from", "/no/such/file"], "cannot read /no/such/file"),
        (["topo", "--save", "/no/such/folder/x"], "cannot write /no/such/folder/x"),
        (["topo", "--root", "/tmp", "--from", SEED[0]], "give one of them"),
        (["topo", "--routes", "ftp://x"], "is no URL"),
        (["topo", "--routes", "http://x:notaport"], "is no URL"),
        (["topo", "--routes", "127.0.0.1:1"], "nothing answers at"),
        (["topo", "--routes", "127.0.0.1:1", "--root", "/"], "--root cannot go with it"),
        (["bench", "transfr"], "No such command"),
    ],
)
def test_what_cannot_be_is_refused_in_words(arguments: list[str], said: str):
    assert said in refused(*arguments)


def test_planned_routes_name_every_way_with_its_reason():
    output = slipstream("topo", "--from", *SEED, "--routes").output
    order = [output.index(way) for way in ("nvlink by", "host-memory by", "rdma-loopback by", "tcp by", "pcie-peer by")]
    assert order == sorted(order)
    assert "NVLink between all GPUs" in output
    assert "peer copies of this pair go over NVLink" in " ".join(output.split())


def test_planned_routes_as_json_have_all_pairs():
    report = json.loads(slipstream("topo", "--from", *SEED, "--routes", "--json").output)
    assert len(report["pairs"]) == 28
    assert report["pairs"][0]["paths"][0]["way"] == "nvlink"


def test_measured_routes_say_why_nothing_better_was_taken(router: str):
    output = slipstream("topo", "--routes", router).output
    assert "prefill-0 -> decode-0   0 -> 0   shm         3.50 GB/s   120 µs    verified" in output
    assert "not cuda_ipc: no GPU" in output
    assert "not tcp" not in output  # it would not be better
    assert "not local" not in output
    assert "no transport serves this pair" in output


def test_measured_routes_as_json(router: str):
    first, second = json.loads(slipstream("topo", "--routes", router, "--json").output)["routes"]
    assert (first["source"], first["destination"], first["gb_per_s"]) == ("prefill-0", "decode-0", 3.5)
    assert second["error"].startswith("no transport")


def test_a_router_that_wants_a_key_is_given_one(router: str):
    assert "shm" in slipstream("topo", "--routes", router, "--api-key", "secret").output
    assert "wants an API key" in refused("topo", "--routes", router, "--api-key", "wrong")


def test_a_port_that_is_no_router_is_named():
    with pytest.raises(SlipstreamError, match="not that of a slipstream router"):
        routes.members(b'{"workers": 3}')


@pytest.mark.parametrize("body", [b"null", b"[1]", b"{}", b'{"error": {"message": "boom"}}', b"<html>"])
def test_other_json_is_not_taken_for_a_router_without_workers(body: bytes):
    with pytest.raises(SlipstreamError, match="not that of a slipstream router"):
        routes.members(body)


def test_a_bare_host_and_port_is_a_url():
    assert asking.base_url("localhost:8000") == "http://localhost:8000"
    assert asking.base_url("http://[::1]:8000/v1") == "http://[::1]:8000"
    for text in ("http://", "http://[::1", "http://h:99999", "ftp://h", "http://" + "x" * 70):
        with pytest.raises(ConfigError, match="no URL"):
            asking.base_url(text)


def test_bench_lists_what_can_be_measured_and_runs_it(tmp_path: Path):
    assert "transfer" in slipstream("bench", "--help").output
    results = tmp_path / "transfer.json"
    given = ["--engines", "shm", "--memory", "cpu,cpu", "--sizes", "64K", "--batch", "1M", "--case-seconds", "0.01"]
    result = slipstream("bench", "transfer", *given, "--json", str(results))
    assert result.exit_code == 0, result.output
    assert all(row["verified"] for row in json.loads(results.read_text())["rows"])
