"""What the first request of a fresh pair finds: everything that it needs has been there before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.tiny_models import tiny_model

# A prefill and a decode worker and a router in one fresh interpreter. `alone`, as in a process of their own.
PROGRAM = """
import asyncio, gc, json, sys, threading
from slipstream.config import EngineConfig, RouterConfig, TransferConfig, WorkerConfig
from slipstream.engine.worker import Worker
from slipstream.router import Router
from slipstream.types import Request, SamplingParams
from tests.unit.toy_cluster import Client, until

found = {}
engine = EngineConfig(model=sys.argv[1], device="cpu", threads=1, kv_tokens=4096, max_model_len=1024)
workers = [
    Worker(engine, WorkerConfig(role=role, host="127.0.0.1", port=0), TransferConfig(), alone=True)
    for role in ("prefill", "decode")
]
for worker in workers:
    worker.start()
found["frozen"], found["objects"] = gc.get_freeze_count(), len(gc.get_objects())

async def serve():
    router = Router(RouterConfig(prefill=(workers[0].info.http,), decode=(workers[1].info.http,)))
    await router.start()
    await until(lambda: any(view.routes for view in router.workers()))
    modules, threads = set(sys.modules), set(threading.enumerate())
    client = Client()
    how = SamplingParams(max_tokens=8, seed=1, top_p=0.9, logprobs=2, repetition_penalty=1.1, ignore_eos=True)
    router.submit(Request(id="first", prompt_ids=[3 + n % 200 for n in range(300)], sampling=how), client)
    found["tokens"] = len(await client.answer())
    found["modules"] = sorted(set(sys.modules) - modules)
    found["threads"] = sorted(thread.name for thread in set(threading.enumerate()) - threads)
    await router.stop()

asyncio.run(serve())
for worker in workers:
    worker.stop()
print(json.dumps(found))
"""


def test_the_first_request_imports_nothing_and_what_was_there_is_set_aside(tmp_path: Path):
    folder = tiny_model(tmp_path / "tiny")
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == 8
    assert found["modules"] == []
    assert found["threads"] == []
    assert found["frozen"] > 10 * found["objects"] > 0
