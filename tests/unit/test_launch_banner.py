"""What `serve` says when it is ready, or why no request can be served."""

from __future__ import annotations

import io
import json
import shlex

import msgspec
from rich.console import Console

from slipstream.launch.banner import Member, banner, curl_line, own_command, why_no_route
from slipstream.launch.display import Display
from slipstream.wire import RouteReport

URL = "http://127.0.0.1:8000"


def member(
    name: str, role, *routes: RouteReport, device: str = "cpu (x86_64)", problems: tuple[str, ...] = ()
) -> Member:
    return Member(
        url=f"http://127.0.0.1/{name}",
        state="live",
        role=role,
        name=name,
        devices=[device],
        served_name="m",
        max_model_len=512,
        routes=list(routes),
        problems=list(problems),
    )


def shown(*members: Member, **keywords) -> str:
    return banner(members, url=URL, page_tokens=16, seconds=1.0, router_pid=1, **keywords)


def body_of(line: str) -> tuple[str, dict]:
    words = shlex.split(line)
    return words[2], json.loads(words[words.index("-d") + 1])


def test_the_line_to_try_is_a_chat_where_the_model_has_a_template():
    url, body = body_of(curl_line(URL, "it's"))
    assert url == URL + "/v1/chat/completions"
    assert body["model"] == "it's"
    assert body["messages"]


def test_the_line_to_try_is_a_completion_for_a_model_without_a_template():
    url, body = body_of(curl_line(URL, "m", chats=False))
    assert url == URL + "/v1/completions"
    assert isinstance(body["prompt"], str)
    assert "messages" not in body
    assert "/v1/completions" in shown(member("both-0", "both"), chats=False)


def test_the_line_to_try_names_the_key_but_not_its_value():
    line = curl_line(URL, "m", with_key=True)
    assert '"authorization: Bearer $SLIPSTREAM_API_KEY"' in line  # in double quotes, so that the shell fills it in
    assert "authorization" not in curl_line(URL, "m")
    text = shown(member("both-0", "both"), with_key=True)
    assert text.index("\nexport SLIPSTREAM_API_KEY=<your key>\n") < text.index("$SLIPSTREAM_API_KEY")
    assert "export" not in shown(member("both-0", "both"))


def test_the_command_is_the_script_of_this_installation_where_the_path_has_none_or_another(tmp_path, monkeypatch):
    here, other = tmp_path / "a folder" / "bin", tmp_path / "other"
    for folder in (here, other):
        folder.mkdir(parents=True)
        (folder / "slipstream").write_text("#!/bin/sh\n")
        (folder / "slipstream").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(here / "python"))
    monkeypatch.setenv("PATH", str(other))
    monkeypatch.chdir(tmp_path)
    assert own_command() == "'a folder/bin/slipstream'"
    assert shlex.split(own_command()) == ["a folder/bin/slipstream"]
    monkeypatch.setenv("PATH", f"{here}:{other}")
    assert own_command() == "slipstream"
    monkeypatch.setattr("sys.executable", "/no where/python")
    assert own_command() == "'/no where/python' -m slipstream"
    assert f"check it: bin/slipstream doctor --url {URL}" in shown(member("both-0", "both"), command="bin/slipstream")


def test_ranks_on_one_device_are_counted():
    three = msgspec.structs.replace(member("both-0", "both"), devices=["cpu (x86_64)"] * 3)
    assert " 3 x cpu (x86_64) " in shown(three)
    two = msgspec.structs.replace(three, devices=["cuda:0 (H200)", "cuda:1 (H200)"])
    assert " cuda:0 (H200), cuda:1 (H200) " in shown(two)


def test_the_doctor_is_named_with_the_address_of_this_cluster():
    assert f"slipstream doctor --url {URL}" in shown(member("both-0", "both"))


def test_ways_between_gpus_are_not_explained_where_there_is_none():
    reasons = {"cuda_ipc": "here: it moves memory of GPUs", "shm": "another namespace"}
    route = RouteReport(peer="d", transport="tcp", rejected=reasons)
    on_cpu = shown(member("p", "prefill", route), member("d", "decode"))
    assert "not shm: another namespace" in on_cpu
    assert "cuda_ipc" not in on_cpu
    assert "not cuda_ipc" in shown(member("p", "prefill", route), member("d", "decode", device="cuda:0 (H200)"))


def test_only_ways_that_would_be_better_are_explained():
    reasons = {"local": "another process", "nixl": "absent", "mooncake": "absent"}
    over_nvlink = RouteReport(peer="d", transport="cuda_ipc", rejected=reasons)
    assert "not " not in shown(member("p", "prefill", over_nvlink), member("d", "decode", device="cuda:0 (H200)"))
    over_tcp = RouteReport(peer="d", transport="tcp", rejected=reasons, rdma=True)
    assert "not nixl: absent" in shown(member("p", "prefill", over_tcp), member("d", "decode"))


def test_no_route_at_all_has_its_reasons_once_each():
    failed = [RouteReport(peer=name, transport="none", error="not here") for name in ("d0", "d1")]
    source = member("p", "prefill", *failed)
    assert why_no_route([source, member("d0", "decode"), member("d1", "decode")]) == "not here"


def test_a_pair_that_does_not_fit_is_no_route_either():
    source = member("p", "prefill", problems=("p and d cannot exchange KV: dtype differs",))
    assert why_no_route([source, member("d", "decode")]) == "p and d cannot exchange KV: dtype differs"


def test_a_pair_that_works_or_is_not_measured_yet_is_no_reason_to_give_up():
    failed, works = RouteReport(peer="d0", transport="none", error="not here"), RouteReport(peer="d1", transport="shm")
    decoders = [member("d0", "decode"), member("d1", "decode")]
    assert why_no_route([member("p", "prefill", failed, works), *decoders]) == ""
    assert why_no_route([member("p", "prefill", failed), *decoders]) == ""
    assert why_no_route([member("both-0", "both")]) == ""


def test_every_pair_of_ranks_has_its_route_in_the_table():
    routes = [
        RouteReport(peer="d", transport="shm", gb_per_s=3.0, source_rank=0, destination_rank=0),
        RouteReport(peer="d", transport="tcp", gb_per_s=1.0, source_rank=1, destination_rank=0),
    ]
    source, destination = member("p", "prefill", *routes), member("d", "decode")
    source.devices = ["cpu", "cpu"]
    text = shown(source, destination)
    assert "p rank 0 -> d rank 0   shm" in text
    assert "p rank 1 -> d rank 0   tcp" in text
    assert "p -> d   " in shown(member("p", "prefill", routes[0]), destination)


def test_the_table_of_the_start_shows_a_route_without_the_ways_not_taken():
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    display = Display(["prefill-0"], "text", table=True, console=console)
    route = "route to decode-0: shm, 4.9 GB/s, 283 us; not cuda_ipc: here: it moves memory of GPUs"
    display.line("prefill-0", f"20:57:22.134 engine.peers: {route}")
    table = io.StringIO()
    Console(file=table, width=200).print(display._table())
    display.close()
    assert "route to decode-0: shm, 4.9 GB/s, 283 us" in table.getvalue()
    assert "cuda_ipc" not in table.getvalue()
