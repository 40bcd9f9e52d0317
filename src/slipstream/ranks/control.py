"""The control channel between rank 0 of a worker and each other rank: a socket pair that the other inherits.

    rank 0      Begin, Proceed                     what to load, how large the pool is
    the other   Opened, Ready, or Refused          what came of it
    rank 0      Call                               a method of `transfer.rank.Rank`, for links and preflights
    the other   Answer, Copied, StepFailed         of a call; of a copy order; of a step

Frames are a length and msgpack, as on links. Plans and copies go by the ring instead. The end of the socket is the end
of the process behind it, on either side.
"""

from __future__ import annotations

import inspect
import socket
import threading
from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec

from slipstream.config import EngineConfig, TransferConfig
from slipstream.errors import MissingExtra, PeerLost, SetupError, SlipstreamError, TransferError
from slipstream.transfer.rank import Rank
from slipstream.transfer.transports.base import Exports

MAX_FRAME = 64 << 20


class Begin(msgspec.Struct, tag=True, kw_only=True):
    """Load your part of this model. `log_level` empty: say nothing below a warning."""

    engine: EngineConfig
    transfer: TransferConfig
    rank: int
    size: int
    host: str
    name: str
    log_level: str = ""
    log_format: str = "text"


class Proceed(msgspec.Struct, tag=True, kw_only=True):
    """All ranks have loaded: make a pool of `pages` pages, join the others, make a runner."""

    pages: int
    nccl_id: bytes = b""


class Call(msgspec.Struct, tag=True):
    number: int
    verb: str
    arguments: list[msgspec.Raw]


class Opened(msgspec.Struct, tag=True):
    """The weights are loaded; a pool of `pages` pages would fit."""

    pages: int
    device: str


class Ready(msgspec.Struct, tag=True):
    exports: Exports


class Refused(msgspec.Struct, tag=True):
    """This rank cannot work, for the reason given, and ends."""

    code: str
    message: str


class Answer(msgspec.Struct, tag=True):
    """What a call returned, or the code and message of the error that it raised."""

    number: int
    value: msgspec.Raw
    code: str = ""
    message: str = ""


class Copied(msgspec.Struct, tag=True):
    """A copy order has been carried out, or has failed and nothing of it can arrive any more."""

    job: int
    error: str | None = None


class StepFailed(msgspec.Struct, tag=True):
    """A step has raised an error here, after this many exchanges with the other ranks."""

    step: int
    exchanges: int
    message: str


class Differs(msgspec.Struct, tag=True):
    """The tokens that this rank has sampled in a step are not those of rank 0."""

    step: int


ToFollower = Begin | Proceed | Call
ToLeader = Opened | Ready | Refused | Answer | Copied | StepFailed | Differs


class Channel:
    """One end. `send` may be called from any thread; `receive` from one."""

    def __init__(self, sock: socket.socket, union: Any) -> None:
        self.sock = sock
        self._decoder = msgspec.msgpack.Decoder(union)
        self._lock = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Raises PeerLost when the other process is gone."""
        body = msgspec.msgpack.encode(message)
        try:
            with self._lock:
                self.sock.sendall(len(body).to_bytes(4, "little") + body)
        except OSError as error:
            raise PeerLost(f"a rank of this worker has ended ({error.strerror or error})") from error

    def receive(self) -> Any:
        """The next message; None at the end. Raises msgspec.MsgspecError on what is none."""
        try:
            size = int.from_bytes(self._exactly(4), "little")
            return self._decoder.decode(self._exactly(size))
        except OSError:
            return None

    def _exactly(self, size: int) -> bytes:
        if size > MAX_FRAME:
            raise OSError(f"a frame of {size} bytes")
        data = bytearray()
        while len(data) < size:
            piece = self.sock.recv(size - len(data))
            if not piece:
                raise OSError("the end")
            data += piece
        return bytes(data)

    def close(self) -> None:
        self.sock.close()


def _verbs() -> Iterator[tuple[str, tuple[list[Any], Any]]]:
    for name, method in inspect.getmembers(Rank, inspect.iscoroutinefunction):
        hints = get_type_hints(method)
        result = hints.pop("return")
        yield name, (list(hints.values()), result)


VERBS: dict[str, tuple[list[Any], Any]] = dict(_verbs())  # name of a method of Rank -> types of arguments and result


def call(number: int, verb: str, arguments: tuple[Any, ...]) -> Call:
    return Call(number, verb, [msgspec.Raw(msgspec.msgpack.encode(argument)) for argument in arguments])


async def carry_out(rank: Rank, asked: Call) -> Answer:
    """Calls a method of `rank`; an error of ours becomes part of the answer. Raises KeyError for no method of Rank."""
    types, _ = VERBS[asked.verb]
    arguments = [msgspec.msgpack.decode(raw, type=kind) for raw, kind in zip(asked.arguments, types, strict=True)]
    try:
        value = await getattr(rank, asked.verb)(*arguments)
    except SlipstreamError as error:
        return Answer(asked.number, msgspec.Raw(msgspec.msgpack.encode(None)), error.code, error.message)
    return Answer(asked.number, msgspec.Raw(msgspec.msgpack.encode(value)))


def result_of(verb: str, answer: Answer) -> Any:
    """What the method returned. Raises what it raised."""
    if answer.code:
        raise error_of(answer.code, answer.message)
    return msgspec.msgpack.decode(answer.value, type=VERBS[verb][1])


def error_of(code: str, message: str) -> SlipstreamError:
    """The error of ours with this code."""
    kinds: list[type[SlipstreamError]] = [SetupError, TransferError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    plain = (kind for kind in kinds if kind.code == code and kind is not MissingExtra)
    return next(plain, SetupError)(message)
