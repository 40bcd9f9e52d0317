"""Which transport mooncake will use, said before it does; the rest is in tests/proc/test_transfer_packages.py."""

from __future__ import annotations

import pytest

from slipstream.errors import RouteUnavailable
from slipstream.transfer.transports.mooncake import choose

PLAIN = {"SUPPORT_CUDA": False, "SUPPORT_INTRA_NVLINK": False, "SUPPORT_MNNVL": False}
CUDA = dict.fromkeys(PLAIN, True)
NIC = ["mlx5_0"]


@pytest.mark.parametrize(
    ("environment", "flags", "nics", "kind", "transport", "forced"),
    [
        ({}, PLAIN, [], "cpu", "tcp", True),
        ({}, CUDA, [], "cpu", "tcp", True),
        ({}, CUDA, [], "cuda", "tcp", True),
        ({}, PLAIN, NIC, "cpu", "rdma", False),
        ({}, CUDA, NIC, "cuda", "rdma", False),
        ({"MC_FORCE_TCP": "0"}, CUDA, NIC, "cuda", "tcp", False),
        ({"MC_INTRANODE_NVLINK": "0"}, CUDA, NIC, "cuda", "nvlink_intra", False),
        ({"MC_INTRANODE_NVLINK": "1"}, PLAIN, NIC, "cpu", "rdma", False),
        ({"MC_FORCE_MNNVL": "1"}, CUDA, NIC, "cuda", "nvlink", False),
        ({"MC_FORCE_TCP": "1", "MC_INTRANODE_NVLINK": "1"}, CUDA, [], "cuda", "tcp", False),
    ],
)
def test_the_choice_follows_the_packages_own_order_and_is_pinned_where_it_would_slide(
    environment: dict[str, str], flags: dict[str, bool], nics: list[str], kind: str, transport: str, forced: bool
) -> None:
    choice = choose(environment, flags, nics, kind)
    assert (choice.transport, choice.force_tcp) == (transport, forced)
    assert choice.why


def test_a_build_without_cuda_is_refused_for_memory_of_a_gpu() -> None:
    with pytest.raises(RouteUnavailable, match="has no CUDA"):
        choose({}, PLAIN, NIC, "cuda")


@pytest.mark.parametrize("variable", ["MC_INTRANODE_NVLINK", "MC_FORCE_MNNVL"])
def test_nvlink_is_refused_for_memory_of_the_cpu(variable: str) -> None:
    with pytest.raises(RouteUnavailable, match=f"{variable} is set"):
        choose({variable: "1"}, CUDA, NIC, "cpu")
