"""Two processes: one writes pages into the other's memory, waits until they are there, and says so.

python examples/transfer_two_processes.py
"""

import multiprocessing
import queue

from slipstream.config import TransferConfig
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import HostPool
from slipstream.transfer.agent import CopyJob, TransferAgent

LAYOUT = KVLayout(page_tokens=16, layers=24, kv_heads=2, head_dim=64, dtype="bfloat16", total_kv_heads=2)


def decode(pipe) -> None:
    pool = HostPool.allocate(LAYOUT, pages=64, probe_bytes=1 << 20)  # register: memory that peers can reach
    agent = TransferAgent(pool.region, LAYOUT, TransferConfig(), on_done=lambda job, error: None)
    agent.admit("prefill", pipe.recv())  # who may write here
    pipe.send([agent.exports()])  # how to reach it
    pages = pipe.recv()  # the notice: these pages are complete
    first_bytes = [int(pool.array[page * LAYOUT.page_bytes]) for page in pages]
    print(f"received pages {pages}; their first bytes are {first_bytes}")
    agent.source_gone("prefill")  # proof that nothing more can arrive: from here on the memory may be reused
    agent.close()


def prefill(pipe) -> None:
    pool = HostPool.allocate(LAYOUT, pages=64, probe_bytes=1 << 20)
    done = queue.SimpleQueue()
    agent = TransferAgent(pool.region, LAYOUT, TransferConfig(), on_done=lambda job, error: done.put(error))
    pipe.send([agent.exports()])
    routes = agent.connect("decode", pipe.recv())
    for page in (1, 2, 3):
        pool.array[page * LAYOUT.page_bytes : (page + 1) * LAYOUT.page_bytes] = 10 * page
    agent.submit(CopyJob("decode", xfer=1, source_pages=[1, 2, 3], destination_pages=[40, 7, 21]))
    error = done.get()  # None once every byte is visible to the other process
    print(f"wrote 3 pages of {LAYOUT.page_bytes} bytes over {routes[0].transport}; error: {error}")
    pipe.send([40, 7, 21])
    agent.close()


if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=decode, args=(there,))
    other.start()
    prefill(here)
    other.join()
