"""Orders to the ranks of a worker: their encoding, and the ring by which they travel between processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream.engine.plan import NewRow, StepPlan
from slipstream.ranks import codec
from slipstream.ranks.ring import FRAME, RingBroken, RingReader, RingWriter
from slipstream.types import SamplingParams

ARRAYS = (*codec.COLUMNS, "sample")


def random_plan(rng: np.random.Generator) -> StepPlan:
    sequences, pages = int(rng.integers(1, 9)), int(rng.integers(1, 30))
    counts = rng.integers(1, 40, sequences)
    tokens = int(counts.sum())
    wanted = rng.permutation(sequences)[: int(rng.integers(0, 3))]
    return StepPlan(
        step=int(rng.integers(0, 1 << 40)),
        token_ids=rng.integers(-1, 1 << 31, tokens),
        positions=rng.integers(0, 1 << 31, tokens),
        query_start=np.concatenate([[0], np.cumsum(counts)]),
        context_lens=rng.integers(1, 1 << 31, sequences),
        block_tables=rng.integers(0, 1 << 31, (sequences, pages)),
        rows=rng.permutation(64)[:sequences],
        sample=rng.random(sequences) < 0.5,
        new_rows=[
            NewRow(
                row=row,
                sampling=SamplingParams(seed=int(rng.integers(0, 1 << 63)), top_p=0.5, logit_bias={3: -1.5}),
                prompt_ids=rng.integers(0, 100, 3).tolist(),
                output_ids=[1, 2],
                eos_ids=(1, 7),
                outputs=2,
            )
            for row in range(int(rng.integers(0, 3)))
        ],
        freed_rows=rng.integers(0, 64, int(rng.integers(0, 4))).tolist(),
        prompt_logprobs={int(i): rng.integers(-1, 1000, int(counts[i])) for i in wanted},
    )


def test_the_encoding_knows_every_field_of_a_plan() -> None:
    names = {field.name for field in dataclasses.fields(StepPlan)}
    assert names == {*ARRAYS, "step", "new_rows", "freed_rows", "prompt_logprobs"}


def test_a_plan_arrives_as_it_was_sent() -> None:
    rng = np.random.default_rng(1)
    for number in range(300):
        plan = random_plan(rng)
        header, found = codec.decode(b"".join(codec.encode_plan(plan, (number, 77))))
        assert isinstance(header, codec.PlanOrder)
        assert header.checked == (number, 77)
        for name in ARRAYS:
            sent, came = np.asarray(getattr(plan, name)), getattr(found, name)
            assert came.dtype == (np.bool_ if name == "sample" else np.int64)
            assert came.flags.writeable
            assert np.array_equal(sent, came), name
        assert (found.step, found.freed_rows, found.new_rows) == (plan.step, plan.freed_rows, plan.new_rows)
        assert list(found.prompt_logprobs) == list(plan.prompt_logprobs)
        assert all(np.array_equal(found.prompt_logprobs[i], plan.prompt_logprobs[i]) for i in plan.prompt_logprobs)


def test_copies_and_the_stop_arrive_as_they_were_sent() -> None:
    for count in (0, 1, 3, 1000):
        source, destination = list(range(count)), list(range(5, 5 + count))
        order = codec.CopyOrder(7, "peer/1", 9, 12, count)
        header, (a, b) = codec.decode(b"".join(codec.encode_copy(order, source, destination)))
        assert header == order
        assert (a.tolist(), b.tolist()) == (source, destination)
    header, what = codec.decode(b"".join(codec.encode_stop()))
    assert (header, what) == (codec.StopOrder(), None)


def test_what_is_no_order_is_refused() -> None:
    whole = b"".join(codec.encode_plan(random_plan(np.random.default_rng(2))))
    for damaged in (b"", whole[:3], whole[:20], whole[: len(whole) // 2], b"\x04\0\0\0abcd"):
        with pytest.raises((ValueError, msgspec.MsgspecError)):
            codec.decode(damaged)


def reader_of(writer: RingWriter, reader: int = 0) -> RingReader:
    """As a process that has inherited the descriptors would have it."""
    ring, bell = (os.dup(fd) for fd in writer.fds(reader))
    return RingReader((ring, bell), reader, writer.readers)


def test_orders_come_in_order_whatever_their_size_and_the_readers_pace() -> None:
    rng = np.random.default_rng(3)
    writer = RingWriter(3, capacity=8192)
    sizes = [0, 1, 15, 16, 17, 2031, 2032, 2033, 8192, 50_000, *rng.integers(0, 5000, 300).tolist()]
    orders = [rng.integers(0, 256, size, dtype=np.uint8).tobytes() for size in sizes]
    got: list[list[bytes]] = [[], [], []]

    def read(number: int) -> None:
        reader, pace = reader_of(writer, number), np.random.default_rng(number)
        for _ in orders:
            order = reader.get(60.0)
            assert order is not None
            got[number].append(order)
            if pace.random() < 0.02 * number:
                time.sleep(0.003)
        assert reader.get(0.0) is None
        reader.close()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for order in orders:
        writer.put([order[:7], order[7:]])
    for thread in threads:
        thread.join()
    assert all(orders == mine for mine in got)
    writer.close()
    writer.close()


CHILD = """
import sys
from slipstream.ranks.ring import RingReader
fd, bell, count = map(int, sys.argv[1:])
reader = RingReader((fd, bell), 0, 1)
for _ in range(count):
    sys.stdout.buffer.write(reader.get(60.0))
sys.stdout.flush()
"""


def test_orders_cross_a_process_border() -> None:
    writer = RingWriter(1, capacity=4096)
    fds = writer.fds(0)
    child = subprocess.Popen([sys.executable, "-c", CHILD, *map(str, (*fds, 50))], pass_fds=fds, stdout=subprocess.PIPE)
    orders = [bytes([number]) * (number * 37) for number in range(50)]
    for order in orders:
        writer.put([order])
    assert child.communicate(timeout=60)[0] == b"".join(orders)
    writer.close()


def test_a_full_ring_is_waited_for_within_a_bound_and_only_while_the_readers_live() -> None:
    alive = True
    writer = RingWriter(2, capacity=4096, alive=lambda: alive)
    quick, _slow = reader_of(writer, 0), reader_of(writer, 1)

    def fill() -> None:
        for _ in range(20):
            writer.put([bytes(900)], wait_s=0.05)
            quick.get(0.0)

    with pytest.raises(RingBroken, match=r"rank 2 of this worker has taken no orders"):
        fill()
    alive = False
    with pytest.raises(RingBroken, match="has ended"):
        writer.put([bytes(900)], wait_s=30.0)
    writer.close()


def test_a_reader_that_waits_does_not_compute() -> None:
    writer = RingWriter(1)
    reader = reader_of(writer)
    spent = time.thread_time()
    assert reader.get(0.3) is None
    assert time.thread_time() - spent < 0.1
    writer.close()


def test_a_damaged_frame_is_an_error() -> None:
    for damage in (
        lambda data: FRAME.pack_into(data, 0, 5, 3, 0),
        lambda data: FRAME.pack_into(data, 0, 0, 1 << 30, 0),
    ):
        writer = RingWriter(1, capacity=4096)
        reader = reader_of(writer)
        writer.put([b"abc"])
        data: Any = writer._data.data  # pyright: ignore[reportPrivateUsage]
        damage(data)
        with pytest.raises(RingBroken, match="frame 0 was expected"):
            reader.get(0.0)
        del data
        writer.close()


def test_a_reader_notes_how_far_it_is_and_that_it_lives() -> None:
    writer = RingWriter(2)
    try:
        readers = [
            RingReader(tuple(map(os.dup, writer.fds(reader))), reader, 2)  # pyright: ignore[reportArgumentType]
            for reader in range(2)
        ]
        assert writer.notes(0) == writer.notes(1) == (0, 0, 0)
        readers[1].begin(7)
        assert writer.notes(1) == (7, 0, 0)
        readers[1].end(7)
        readers[1].beat()
        readers[1].beat()
        writer.put([b"an order"])
        assert readers[1].get() == b"an order"
        assert writer.notes(1) == (7, 7, 2)
        assert writer.notes(0) == (0, 0, 0)
        for reader in readers:
            reader.close()
    finally:
        writer.close()
