"""Every kernel of the engine is launched by one of the checks that compare it with its twin."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs an NVIDIA GPU that all kernels run on (compute capability 9.0)",
    ),
]
triton = pytest.importorskip("triton", reason="needs triton (extra: gpu)")

from tests.unit import sampling_checks  # noqa: E402
from tests.unit.kernel_checks import CHECKS  # noqa: E402

from slipstream.run import cuda  # noqa: E402
from slipstream.run.cuda.kernels import hopper  # noqa: E402

ELSEWHERE = ("small", "products", "prefill_gathered", "fp8_gathered", "step")  # on Hopper others take their place


def kernels() -> Iterator[tuple[str, Any]]:
    """Names and functions of all that is launched: what begins with an underscore is part of other kernels."""
    for found in pkgutil.walk_packages(cuda.__path__, f"{cuda.__name__}."):
        module = importlib.import_module(found.name)
        for name, value in vars(module).items():
            if isinstance(value, triton.runtime.jit.JITFunction) and value.__module__ == found.name and name[0] != "_":
                yield f"{found.name}.{name}", value


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The functions that have been launched since."""
    found: set[Any] = set()
    plain = triton.runtime.jit.JITFunction.run

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        if not options.get("warmup"):
            found.add(self.fn)
        return plain(self, *arguments, **options)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("check", ELSEWHERE)
def test_kernels_for_gpus_that_are_not_hoppers_compute_what_their_twins_do(
    check: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "usable", lambda *_: False)
    CHECKS[check](torch.device("cuda:0"), dtype)


@pytest.mark.timeout(240)
def test_no_kernel_of_the_engine_is_without_a_check(launched: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    every = dict(kernels())
    assert {"decode_attention", "few_rows", "attend", "one_row"} <= {name.rpartition(".")[2] for name in every}
    for check in (*CHECKS.values(), *sampling_checks.CHECKS.values()):
        check(torch.device("cuda:0"), torch.bfloat16)
    monkeypatch.setattr(hopper, "usable", lambda *_: False)
    for check in ELSEWHERE:
        CHECKS[check](torch.device("cuda:0"), torch.bfloat16)
    torch.cuda.synchronize()
    assert sorted(name for name, kernel in every.items() if kernel.fn not in launched) == []
