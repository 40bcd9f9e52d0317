"""Every message on every socket.

A socket carries frames: a 4-byte little-endian length, then one msgpack-encoded message of the tagged union of that
socket. There are two kinds of link, both opened by the side named first and both starting with Hello:

    router -> worker   Submit, Abort, Drain, ...      back: Welcome, StepOutput, Failed, Adopted, Status
    worker -> worker   source to destination: Offer, Commit, Cancel, Released, ...   back: Grant, Defer, Refuse, ...

A link is one TCP connection (or socket pair), so that the end of the other process is seen at once as the end of the
stream, and nothing written for a dead peer can ever be read by the one that is started in its place. That is why
there is no message queue library here: these reconnect and redeliver behind the program's back.

KV bytes never pass through these sockets.
"""

from __future__ import annotations

import msgspec

from slipstream.types import Request, Role, Tokens

PROTOCOL = 3
MAX_FRAME = 256 << 20
BlockKey = bytes


class Message(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Base of all messages; the tag is the class name."""


# ---------------------------------------------------------------------------------------------------- opening


class WorkerInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Who a worker is: the answer of its `/worker_info` and the heart of Hello and Welcome.

    `id` is new for each process, so that a worker restarted at the same address is not taken for the old one.
    `fingerprint` is `kv.layout`'s, equal for workers that can exchange pages; `fingerprint_text` spells it out
    for error messages. `weights` names the model's content, whatever it is served as. `wire` is "host:port" of the
    message socket, `http` of the HTTP one.
    """

    id: str
    name: str
    role: Role
    wire: str
    http: str
    model: str
    served_name: str
    fingerprint: str
    fingerprint_text: str
    weights: str = ""
    page_tokens: int
    max_model_len: int
    pages: int
    max_sequences: int
    devices: list[str]
    pid: int
    host: str
    version: str
    tp_size: int = 1
    token_bytes: int = 0  # KV of one token on one rank
    attention: str = ""  # backend of rank 0


class Hello(Message):
    """First message of the connecting side. `kind` "router": `id` names the router; "worker": `info` is given."""

    kind: str
    id: str
    protocol: int = PROTOCOL
    version: str = ""
    info: WorkerInfo | None = None
    regions: list[msgspec.Raw] = []  # how to reach the sender's KV memory, one transfer.transports.base.Exports a rank


class Welcome(Message):
    """The worker's answer to Hello; the link is open."""

    info: WorkerInfo
    protocol: int = PROTOCOL
    regions: list[msgspec.Raw] = []


class Rejected(Message):
    """The worker's other answer to Hello; it closes the link behind it."""

    code: str
    message: str


class Goodbye(Message):
    """Last message of either side of any link that is ended on purpose, and why; `stream.Link` sends and takes it.

    With `dismissed`, a router tells a worker not to join it again by itself.
    """

    reason: str
    dismissed: bool = False


# ---------------------------------------------------------------------------------------------------- router -> worker


class Submit(Message):
    """Take ownership of this request. `decode_at` is the wire address of its decode worker; None means here."""

    request: Request
    decode_at: str | None = None


class Abort(Message):
    """Stop this request, whoever asks again is told nothing: no answer follows. Unknown ids are ignored."""

    request: str
    attempt: int


class Drain(Message):
    """Accept no more requests, finish those that are here; the worker then reports `draining` with load 0."""


class Meet(Message):
    """Open the links to these peers now and run the preflight, so that no request has to wait for it.

    Sent by a router when the set of possible decode workers changes; repeated addresses are no work.
    """

    peers: list[str]


class Ping(Message):
    """Answered by Pong with the same number: who asks, a router or a source, knows that the other side gets on."""

    n: int


# ---------------------------------------------------------------------------------------------------- worker -> router


class StepOutput(Message):
    """All tokens that one engine step made for this router."""

    tokens: list[Tokens]


class Failed(Message):
    """This attempt is over without a finish; `retriable` says whether it may be continued elsewhere."""

    request: str
    attempt: int
    code: str
    message: str
    retriable: bool


class Adopted(Message):
    """The sender owns this request now: it was handed over by its prefill worker."""

    request: str
    attempt: int


class RouteReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a preflight found for one (source rank, destination rank): the chosen transport, and why no better one.

    `rdma`: whether both ranks have a device that can carry data, which decides what is better.
    """

    peer: str
    transport: str
    gb_per_s: float = 0.0
    latency_us: float = 0.0
    source_rank: int = 0
    destination_rank: int = 0
    rejected: dict[str, str] = {}
    rdma: bool = False
    error: str = ""


class Status(Message):
    """Load of a worker, after every change worth knowing and at least once a second.

    `added` and `removed` are the block keys that entered or left the prefix cache since the last Status on this
    link; `reset` says that the router must forget what it knew first.

    The last four are averages over the last steps, 0 while unknown: prompt tokens a second in steps of prompts alone
    and in mixed ones (prompts beside sequences that decode), and seconds of a mixed step and of one that only decodes.
    """

    waiting: int
    running: int
    handing_off: int
    waiting_tokens: int
    pages_free: int
    pages_cached: int
    pages_total: int
    draining: bool = False
    added: list[BlockKey] = []
    removed: list[BlockKey] = []
    reset: bool = False
    routes: list[RouteReport] = []
    prompt_rate: float = 0.0
    mixed_rate: float = 0.0
    mixed_step_s: float = 0.0
    decode_step_s: float = 0.0


class Pong(Message):
    n: int


# ---------------------------------------------------------------------------------------------------- preflight
# Between Welcome and the first Offer, from source to destination, once for each transport tried on each pair of ranks.


class ProbeOpen(Message):
    """Source to destination: may I write into your probe area? The answer waits until no other probe uses it."""

    probe: int
    destination_rank: int = 0


class ProbeGrant(Message):
    """Destination to source: write here, and nowhere else. `error` says why not."""

    probe: int
    offset: int = 0
    bytes: int = 0
    error: str = ""


class ProbeWritten(Message):
    """Source to destination: `bytes` bytes of this seed's pattern, scattered in blocks, are in place; look."""

    probe: int
    seed: int
    bytes: int
    block: int


class ProbeResult(Message):
    """Destination to source: what I found in my memory; an empty `error` means exactly the pattern."""

    probe: int
    error: str = ""


class ProbeClose(Message):
    """Source to destination: no write of this probe is in flight or will come; the area is free."""

    probe: int


# ---------------------------------------------------------------------------------------------------- the handoff
# Source P, destination D. `xfer` is chosen by P, unique within the link. See docs/protocol.md.


class Offer(Message):
    """P to D: I am computing this; where shall it go? `pages_needed` covers the prompt, the last page in part.

    `prompt` are the request's prompt ids, four bytes each, little-endian: Commit, which follows the last copy and which
    the request waits for, needs not bring them then.
    """

    xfer: int
    request: str
    attempt: int
    prompt_len: int
    block_keys: list[BlockKey]
    pages_needed: int
    max_tokens: int
    priority: int = 0
    prompt: bytes = b""


class Grant(Message):
    """D to P: write these pages. The first `skip_tokens` (whole pages) I hold already: `pages` covers the rest, in
    order. `generation` is the grant's own number; P returns it with Commit and Released."""

    xfer: int
    skip_tokens: int
    pages: list[int]
    generation: int


class Defer(Message):
    """D to P: no room yet; a Grant or a Refuse will follow."""

    xfer: int


class Refuse(Message):
    """D to P: never. `code` is an error code of `slipstream.errors`."""

    xfer: int
    code: str
    message: str


class Commit(Message):
    """P to D: every write of every rank is visible; the request is yours.

    `request.output_ids` holds all tokens made so far, the first token of this prefill last; the router has them
    already. KV of all tokens but that last one is in the granted pages. `request.prompt_ids` is empty where the Offer
    has brought the prompt.
    """

    xfer: int
    generation: int
    request: Request
    router: str
    cached_tokens: int


class Accepted(Message):
    """D to P: it is mine; unpin your pages."""

    xfer: int


class Cancel(Message):
    """P to D: this request ends here; take the pages back once I say Released."""

    xfer: int
    code: str


class Revoke(Message):
    """D to P: stop writing; the request was aborted or I am going. Answer with Released."""

    xfer: int
    code: str


class Released(Message):
    """P to D: no write of mine under this transfer is in flight or will ever come."""

    xfer: int
    generation: int


FromRouter = Hello | Submit | Abort | Drain | Meet | Ping | Goodbye
ToRouter = Welcome | Rejected | StepOutput | Failed | Adopted | Status | Pong | Goodbye
Probe = ProbeOpen | ProbeWritten | ProbeClose
FromSource = Hello | Probe | Offer | Commit | Cancel | Released | Ping | Goodbye
FromDestination = (
    Welcome | Rejected | ProbeGrant | ProbeResult | Grant | Defer | Refuse | Accepted | Revoke | Pong | Goodbye
)
ToWorker = FromRouter | FromSource

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """One frame: length and body."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


class Decoder:
    """Decodes frame bodies of one union, for example `Decoder(ToWorker)`. Raises msgspec.MsgspecError on nonsense."""

    def __init__(self, union: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def __call__(self, body: bytes) -> Message:
        return self._decoder.decode(body)
