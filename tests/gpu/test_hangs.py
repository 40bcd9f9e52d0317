"""A kernel that never ends: its worker says which step hangs and ends, another one answers, and it is started again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

from tests.proc.load import check_texts, every_page_is_free, under_load  # noqa: E402
from tests.proc.programs import alive, serving, until  # noqa: E402
from tests.unit.tiny_models import tiny_model  # noqa: E402

from slipstream.lifeline import HUNG  # noqa: E402

STEP_TIMEOUT_S = 4
HANG = '''
"""Imported by every python that is started with this folder in its path: one step's kernel does not end.

That of the process whose id is in the file `victim`, which it takes away.
"""
import os, sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path

NAME, VICTIM = "slipstream.run.cuda.runner", Path(__file__).parent / "victim"


class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            launch = module.CudaRunner.launch

            def hanging(runner, plan):
                if VICTIM.exists() and VICTIM.read_text() == str(os.getpid()):
                    import torch

                    VICTIM.unlink()
                    with runner._on_stream():
                        torch.cuda._sleep(1 << 50)
                launch(runner, plan)

            module.CudaRunner.launch = hanging

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
'''


def test_a_kernel_that_hangs_costs_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(HANG)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(hooks), os.environ.get("PYTHONPATH")])))
    model = str(tiny_model(tmp_path / "model", "llama", tokenizer=True, head_dim=32, hidden_size=128))
    two = "cuda:0,1" if torch.cuda.device_count() > 1 else "2xcuda:0"
    options = ("--both", two, "--served-model-name", "tiny", "--dtype", "float32", "--chunk-tokens", "64")
    with serving(*options, "--step-timeout-s", str(STEP_TIMEOUT_S), model=model) as (program, server, pids):
        old = pids["both-0"]
        said = len(program.output)
        seen = under_load(
            server,
            lambda: (hooks / "victim").write_text(str(old)),
            lambda: server.pids().get("both-0", old) != old,
            "both-0 is back",
        )
        assert (seen.wrong, seen.broken, seen.refused) == ([], [], [])
        check_texts(server, seen)
        every_page_is_free(server)
        until(lambda: not alive(old), "the worker that hung is gone")
        log = program.output[said:]
        assert re.search(r"this worker hangs: \w+ step \d+ .* has not ended", log)
        assert f"both-0 (pid {old}) ended with exit code {HUNG}: it hung" in log
