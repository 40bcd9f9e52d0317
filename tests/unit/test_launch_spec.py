"""Which workers a spec means, on machines with and without GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.launch.devices import Gpu, Machine, select_visible, usable_cores
from slipstream.launch.spec import Placement, place, refuse_idle_transport

LAPTOP = Machine(cores=2)
NAMES = ("GPU-aa00", "GPU-ab11", "GPU-bb22", "GPU-cc33")


def server(gpus: int) -> Machine:
    return Machine(cores=16, gpus=tuple(Gpu(i, NAMES[i], "H200", 140 << 30) for i in range(gpus)))


def devices(machine: Machine, prefill="", decode="", both="", device="auto", tp=1) -> dict[str, str]:
    return {p.name: p.device for p in place(machine, prefill, decode, both, device, tp)}


def test_without_gpus_one_cpu_worker_prefills_and_one_decodes():
    assert place(LAPTOP, "", "", "") == [
        Placement("prefill-0", "prefill", "cpu"),
        Placement("decode-0", "decode", "cpu"),
    ]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, {"both-0": "cuda:0"}),
        (2, {"prefill-0": "cuda:0", "decode-0": "cuda:1"}),
        (3, {"prefill-0": "cuda:0", "decode-0": "cuda:1", "decode-1": "cuda:2"}),
        (4, {"prefill-0": "cuda:0", "prefill-1": "cuda:1", "decode-0": "cuda:2", "decode-1": "cuda:3"}),
    ],
)
def test_gpus_are_split_in_halves(gpus, expected):
    assert devices(server(gpus)) == expected


def test_a_device_for_all_is_obeyed():
    assert devices(server(2), device="cpu") == {"prefill-0": "cpu", "decode-0": "cpu"}
    assert devices(server(2), device="cuda:1") == {"both-0": "cuda:1"}
    assert devices(server(2), prefill="1", decode="1", device="cuda:1") == {
        "prefill-0": "cuda:1",
        "decode-0": "cuda:1",
    }


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ({"prefill": "2", "decode": "1"}, ["cuda:0", "cuda:1", "cuda:2"]),
        ({"prefill": "0,1", "decode": "2,3"}, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ({"prefill": "cuda:3", "decode": "cuda:0-2"}, ["cuda:3", "cuda:0", "cuda:1", "cuda:2"]),
        ({"prefill": "1", "decode": "cuda:0"}, ["cuda:1", "cuda:0"]),
        ({"prefill": "2xcpu", "decode": "cpu,cuda:1,2"}, ["cpu", "cpu", "cpu", "cuda:1", "cuda:2"]),
        ({"both": "2xcuda:0"}, ["cuda:0", "cuda:0"]),
        ({"both": "GPU-b"}, ["cuda:2"]),
        ({"prefill": " 1 ", "decode": "1", "both": "1"}, ["cuda:0", "cuda:1", "cuda:2"]),
        ({"prefill": "0", "decode": "0", "both": "1"}, ["cuda:0"]),
    ],
)
def test_specs(specs, expected):
    assert list(devices(server(4), **specs).values()) == expected


def ranks(machine: Machine, prefill="", decode="", both="", device="auto", tp=1) -> list[tuple[str, str, int]]:
    return [(p.name, p.device, p.tp) for p in place(machine, prefill, decode, both, device, tp)]


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (
            {"prefill": "tp2@cuda:0,cuda:1", "decode": "cuda:2"},
            [("prefill-0", "cuda:0,cuda:1", 2), ("decode-0", "cuda:2", 1)],
        ),
        (
            {"prefill": "tp2@0,1", "decode": "tp2@2,3"},
            [("prefill-0", "cuda:0,cuda:1", 2), ("decode-0", "cuda:2,cuda:3", 2)],
        ),
        ({"both": "tp2@cuda:0-3"}, [("both-0", "cuda:0,cuda:1", 2), ("both-1", "cuda:2,cuda:3", 2)]),
        ({"both": "tp2@cuda:0,1,cuda:3"}, [("both-0", "cuda:0,cuda:1", 2), ("both-1", "cuda:3", 1)]),
        ({"both": "cuda:3,tp2@cuda:1,0"}, [("both-0", "cuda:3", 1), ("both-1", "cuda:1,cuda:0", 2)]),
        ({"both": "tp2@GPU-aa,GPU-c"}, [("both-0", "cuda:0,cuda:3", 2)]),
        ({"both": "tp4@cuda:0-3"}, [("both-0", "cuda:0,cuda:1,cuda:2,cuda:3", 4)]),
        ({"both": "2xtp2@cuda:0,1"}, [("both-0", "cuda:0,cuda:1", 2), ("both-1", "cuda:0,cuda:1", 2)]),
        ({"prefill": "tp2", "decode": "1"}, [("prefill-0", "cuda:0,cuda:1", 2), ("decode-0", "cuda:2", 1)]),
        ({"prefill": "1", "decode": "tp2@0,1"}, [("prefill-0", "cuda:2", 1), ("decode-0", "cuda:0,cuda:1", 2)]),
        ({"prefill": "tp2@cpu", "decode": "cpu"}, [("prefill-0", "cpu", 2), ("decode-0", "cpu", 1)]),
        ({"both": "2xtp2@cpu,cpu"}, [("both-0", "cpu", 2), ("both-1", "cpu", 2), ("both-2", "cpu", 1)]),
        ({"tp": 2}, [("prefill-0", "cuda:0,cuda:1", 2), ("decode-0", "cuda:2,cuda:3", 2)]),
        ({"tp": 3}, [("both-0", "cuda:0,cuda:1,cuda:2", 3)]),
        ({"tp": 2, "prefill": "cuda:0,1"}, [("prefill-0", "cuda:0,cuda:1", 2), ("decode-0", "cuda:2,cuda:3", 2)]),
        ({"tp": 2, "prefill": "tp1@0", "decode": "1"}, [("prefill-0", "cuda:0", 1), ("decode-0", "cuda:1,cuda:2", 2)]),
        ({"tp": 2, "device": "cuda:2,cuda:3"}, [("both-0", "cuda:2,cuda:3", 2)]),
        ({"tp": 2, "device": "cpu"}, [("prefill-0", "cpu", 2), ("decode-0", "cpu", 2)]),
    ],
)
def test_specs_of_workers_with_several_ranks(specs, expected):
    assert ranks(server(4), **specs) == expected


def test_on_a_machine_without_gpus_ranks_share_the_cpu():
    assert ranks(LAPTOP, prefill="tp2", decode="1") == [("prefill-0", "cpu", 2), ("decode-0", "cpu", 1)]
    assert ranks(LAPTOP, tp=2) == [("prefill-0", "cpu", 2), ("decode-0", "cpu", 2)]


@pytest.mark.parametrize(
    ("machine", "specs", "expected"),
    [
        (LAPTOP, {"decode": "2"}, {"prefill-0": "cpu", "decode-0": "cpu", "decode-1": "cpu"}),
        (LAPTOP, {"prefill": "2"}, {"prefill-0": "cpu", "prefill-1": "cpu", "decode-0": "cpu"}),
        (server(4), {"decode": "2"}, {"prefill-0": "cuda:0", "decode-0": "cuda:1", "decode-1": "cuda:2"}),
        (server(2), {"prefill": "cuda:0"}, {"prefill-0": "cuda:0", "decode-0": "cuda:1"}),
        (server(2), {"decode": "cuda:0"}, {"prefill-0": "cuda:1", "decode-0": "cuda:0"}),
        (server(2), {"decode": "2", "device": "cpu"}, {"prefill-0": "cpu", "decode-0": "cpu", "decode-1": "cpu"}),
        (server(2), {"decode": "2", "both": "0"}, None),
        (server(3), {"decode": "1", "both": "1"}, {"decode-0": "cuda:0", "both-0": "cuda:1"}),
    ],
)
def test_a_phase_that_is_left_out_gets_one_worker(machine, specs, expected):
    if expected is None:
        with pytest.raises(ConfigError, match="a prefill worker as well"):
            devices(machine, **specs)
    else:
        assert devices(machine, **specs) == expected


@pytest.mark.parametrize(
    ("machine", "specs", "words"),
    [
        (LAPTOP, {"prefill": "cuda:0", "decode": "1"}, ("--prefill cuda:0", "no cuda:0", "has cpu")),
        (server(2), {"prefill": "1", "decode": "2"}, ("--decode 2", "only 1 GPU", "2xcuda:0")),
        (server(2), {"both": "gpu0"}, ("--both gpu0", "neither a count nor a device", "cuda:1 (H200)")),
        (server(2), {"both": "0,7"}, ("--both 0,7", "no cuda:7")),
        (server(4), {"both": "cuda:3-1"}, ("runs backwards",)),
        (server(4), {"both": "GPU-a"}, ("names 2 GPUs",)),
        (server(4), {"both": "tp2@cuda:0"}, ("a worker of 2 tensor-parallel ranks", "only cuda:0", "tp2@cuda:0-1")),
        (server(4), {"both": "tp2@cuda:0-2"}, ("only cuda:2 is left",)),
        (server(4), {"both": "tp2@cuda:0,cpu"}, ("only cuda:0 is left",)),
        (server(4), {"both": "tp2@0,0"}, ("2 ranks needs as many different GPUs",)),
        (server(4), {"both": "tp0@cpu"}, ("1 to 64", "not 0")),
        (server(4), {"both": "tp2@"}, ("neither a count nor a device",)),
        (server(4), {"prefill": "tp4", "decode": "1"}, ("--decode 1", "only 0 GPU")),
        (server(2), {"both": "2xtp2"}, ("--both 2 with 2 ranks each", "only 2 GPU")),
        (server(4), {"both": "1", "device": "cuda:1", "tp": 2}, ("2 ranks does not fit", "cuda:1")),
        (server(4), {"both": "cuda:"}, ("no GPU number",)),
        (server(4), {"both": "cpu,,cpu"}, ("--both",)),
        (LAPTOP, {"prefill": "2", "decode": "0"}, ("only prefill workers", "--decode 1")),
        (LAPTOP, {"prefill": "0", "decode": "2"}, ("only decode workers", "--prefill 1")),
        (server(2), {"decode": "2"}, ("every GPU", "a prefill worker as well", "cuda:1 (H200)", "--prefill cuda:0")),
        (server(1), {"prefill": "cuda:0"}, ("every GPU", "a decode worker as well")),
        (server(2), {"decode": "3"}, ("--decode 3", "only 2 GPU")),
        (LAPTOP, {"both": "0"}, ("with --both 0 nobody would serve", "--both 1")),
        (LAPTOP, {"decode": "0"}, ("with --decode 0 nobody would decode", "--prefill 1 --decode 1", "--both 1")),
        (LAPTOP, {"prefill": "0"}, ("with --prefill 0 nobody would prefill",)),
        (LAPTOP, {"prefill": "0", "decode": "0"}, ("with --prefill 0 and --decode 0 nobody would serve",)),
        (LAPTOP, {"both": "100000xcpu"}, ("--both 100000xcpu", "at most 256 workers", "worker --join")),
        (LAPTOP, {"prefill": "999999999999"}, ("at most 256 workers",)),
        (LAPTOP, {"both": "257xtp2"}, ("at most 256 workers", "not 257")),
        (LAPTOP, {"both": "1", "device": "tpu"}, ("--device tpu",)),
        (LAPTOP, {"both": "1", "device": "cuda"}, ("only 0 GPU",)),
    ],
)
def test_a_wrong_spec_is_refused_with_what_exists(machine, specs, words):
    with pytest.raises(ConfigError) as caught:
        devices(machine, **specs)
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-aa00", "GPU-ab11", "GPU-bb22"]),
        ("", []),
        ("2,0", ["GPU-bb22", "GPU-aa00"]),
        ("GPU-bb,1", ["GPU-bb22", "GPU-ab11"]),
        ("1,9,0", ["GPU-ab11"]),
        ("GPU-a", []),
        ("-1,0", []),
    ],
)
def test_visible_devices_are_chosen_and_numbered_as_cuda_does(visible, uuids):
    chosen = select_visible(list(server(3).gpus), visible)
    assert [gpu.uuid for gpu in chosen] == uuids
    assert [gpu.index for gpu in chosen] == list(range(len(uuids)))


def test_gpus_that_torch_cannot_use_are_explained():
    machine = Machine(cores=2, note="4 GPU(s) are left out: the installed torch is a build for CPUs")
    with pytest.raises(ConfigError, match="build for CPUs"):
        devices(machine, both="cuda:0")


@pytest.mark.parametrize(("text", "most"), [("100000 100000\n", 1), ("50000 100000\n", 1), ("max 100000\n", 1 << 20)])
def test_a_container_gets_the_cores_it_is_given(tmp_path: Path, text: str, most: int):
    unlimited = usable_cores(tmp_path / "absent")
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path / "cpu.max") == min(most, unlimited)


def test_a_transport_for_one_worker_is_refused():
    one, two = place(LAPTOP, "", "", "1"), place(LAPTOP, "1", "1", "")
    refuse_idle_transport(one, "auto")
    refuse_idle_transport(two, "shm")
    with pytest.raises(ConfigError, match=r"'shm' .* nothing to transfer"):
        refuse_idle_transport(one, "shm")
