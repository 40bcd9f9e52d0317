"""Chooses the prefill and the decode worker of a request. Pure: no sockets, no clock.

The registry keeps one `Standing` a worker: what the worker said of itself (Status), what this router has sent there
since, and which prefixes it holds, by block key. `place` reads them and answers with a `Placement`, or None when no
pair can serve now. The caller then charges the placement to the standings, so that the next choice sees it before the
worker has said anything.

Prefill goes where it costs least time, of all that it delays, in seconds: the prompt itself waits for the tokens queued
there and for its own that are not known there yet; the prompts that come behind it wait for its own; and every sequence
that decodes there loses a part of that time, weighed with `HARM`. How fast a worker computes prompts, alone and beside
sequences, and how long steps of both kinds take, it tells itself (`Pace`): there is no figure of any machine here.
Nor is there a cap against herding: a long queue outweighs a known prefix, and a few decoding sequences, by itself. What
is being computed for another request counts as known, so that equal prompts that come together meet at one worker.

Decode goes where it is disturbed and disturbs least, in shares of its time: sequences and KV in proportion to what the
worker holds; what the prompts there take from it; what these lose by computing beside sequences, if it is not there
that sequences are most; and the seconds that the KV would travel. A known prefix saves bytes, but is worth
`PREFIX_WORTH` sequences at most, so that a popular prefix cannot pile everything up on one worker.

The two rules pull workers for both roles apart: where sequences are, prompts stay away, and where prompts are,
sequences do. Under load such workers become a prefill and a decode worker by themselves, and the decode worker computes
a prompt only when waiting at the other costs more than the harm here. Workers with the role `decode` do the same, if
`help_out` allows it, but there harm weighs `HARM_APART`: a prefill worker that keeps up is not helped.

When no worker of a role is there, one of the other role is borrowed for both halves of the request: prefill and decode
then happen in one place and nothing has to travel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from slipstream import wire
from slipstream.kv.prefix import block_keys, root_key
from slipstream.types import Role

PREFIX_WORTH = 2.0  # sequences that a fully known prefix may outweigh when a decode worker is chosen
LOCAL_WORTH = 1.0  # sequences by which another worker must be ahead before a request leaves the one that prefills it,
HANDOFF_WORTH = 0.02  # and share of its time decoding that must be won there
HELP_WAIT_S = 0.1  # how long a prompt must wait at every prefill worker before decode workers are considered
THRIFT = 0.1  # how much dearer a token to compute is than one to wait for: it takes others' time too
HARM = 0.5  # what a second that a decoding sequence loses to a prompt weighs against a second's wait for a first token
HARM_APART = 2.0  # the same on workers with the role `decode`, which are there so that tokens come evenly
GUESSED_RATE = 10_000.0  # prompt tokens a second, before any worker has told
GUESSED_SLOWDOWN = 3.0  # how many times as slow prompts are beside sequences, and these beside prompts; likewise
BUSY_S = 2.0  # over how long a worker's share of time with prompts is averaged
PRESSED_S = 5.0  # over how long that share is averaged to tell a worker that cannot keep up from a busy moment
PRESSED_MOST = 0.8  # to what it counts then: a queue keeps at most 5 times as many waiting as it has
TRAVEL_WORTH = 1.0  # load that one second of the KV's travel counts for
KEY_SLACK = 1.25  # block keys remembered of a worker, in multiples of its pages


class KnownKeys:
    """Block keys in one worker's prefix cache, as far as it has told. Bounded: the oldest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._keys: dict[bytes, None] = {}
        self._promised: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._keys) + len(self._promised)

    def promise(self, keys: Iterable[bytes]) -> None:
        """These are being computed there for a request; `settle` ends that, the worker has told by then."""
        self._promised.update(keys)

    def settle(self, keys: Iterable[bytes]) -> None:
        self._promised.subtract(keys)
        for key in keys:
            if self._promised[key] <= 0:
                del self._promised[key]

    def update(self, status: wire.Status) -> None:
        if status.reset:
            self._keys.clear()
        for key in status.removed:
            self._keys.pop(key, None)
        for key in status.added:
            self._keys[key] = None
        while len(self._keys) > self._limit:
            del self._keys[next(iter(self._keys))]

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` are known before the first unknown one."""
        for count, key in enumerate(keys):
            if key not in self._keys and key not in self._promised:
                return count
        return len(keys)


class Prompt:
    """The tokens to place, for one choice; block keys are made once for each (fingerprint, page size) asked for."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str = "") -> None:
        self.token_ids = token_ids
        self._salt = cache_salt
        self._keys: dict[tuple[str, int], list[bytes]] = {}
        self._known: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def known(self, standing: Standing) -> int:
        """Tokens of whole pages that the worker holds already; the last token is always computed."""
        known = self._known.get(standing.id)
        if known is None:
            known = standing.keys.leading(self.keys_for(standing)) * standing.page_tokens if standing.keys else 0
            self._known[standing.id] = known
        return known

    def keys_for(self, standing: Standing) -> list[bytes]:
        """Block keys of the whole pages that the worker could hold of this prompt."""
        kind = (standing.fingerprint, standing.page_tokens)
        keys = self._keys.get(kind)
        if keys is None:
            useful = self.token_ids[: max(0, len(self.token_ids) - 1)]
            keys = block_keys(useful, standing.page_tokens, root_key(standing.fingerprint, self._salt))
            self._keys[kind] = keys
        return keys


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a worker's last steps were (see wire.Status); 0 is unknown."""

    prompt_rate: float = 0.0
    mixed_rate: float = 0.0
    mixed_step_s: float = 0.0
    decode_step_s: float = 0.0

    def known(self, others: Iterable[Pace]) -> Pace:
        """With what this one does not know taken from `others`, which run the same model, or guessed."""
        paces = (self, *others)
        prompt = next((pace.prompt_rate for pace in paces if pace.prompt_rate), 0.0)
        mixed = next((pace.mixed_rate for pace in paces if pace.mixed_rate), 0.0)
        prompt = prompt or mixed * GUESSED_SLOWDOWN or GUESSED_RATE
        steps = next(((p.mixed_step_s, p.decode_step_s) for p in paces if p.mixed_step_s and p.decode_step_s), None)
        mixed_s, decode_s = steps or (GUESSED_SLOWDOWN, 1.0)
        return Pace(prompt, min(prompt, mixed or prompt / GUESSED_SLOWDOWN), mixed_s, min(mixed_s, decode_s))

    @property
    def slowed(self) -> float:
        """Share of the time of a mixed step that its sequences lose to its prompts."""
        return 1.0 - self.decode_step_s / self.mixed_step_s

    @property
    def lost(self) -> float:
        """How much longer a prompt takes beside sequences, in multiples of its time alone."""
        return self.prompt_rate / self.mixed_rate - 1.0


UNKNOWN_PACE = Pace()


@dataclass(slots=True)
class Standing:
    """One worker in the eyes of the placement.

    `prefill_tokens` and `sequences` are what this router has sent there and not got back; `foreign_tokens` and
    `foreign_sequences` what the worker reports beyond that, from other routers. `usable` is False while the worker is
    not linked, unhealthy, draining or leaving.
    """

    id: str
    role: Role
    fingerprint: str
    page_tokens: int
    max_sequences: int
    pages_total: int
    token_bytes: int = 0  # KV of one token on one rank; 0 when the worker does not tell
    usable: bool = True
    pages_free: int = 0
    pages_cached: int = 0
    prefill_tokens: int = 0
    prompts: int = 0  # how many prompts these tokens are of
    sequences: int = 0
    foreign_tokens: int = 0
    foreign_sequences: int = 0
    coming: int = 0  # of `sequences`, those whose prompts another worker has yet to compute
    chosen: int = 0  # when it was last chosen, in placements; the longest ago wins a tie
    busy: float = 0.0  # share of the last seconds in which prompts of this router were there
    pressed: float = 0.0  # the same over longer
    seen: float = 0.0  # until when both are reckoned
    pace: Pace = UNKNOWN_PACE
    keys: KnownKeys = field(default_factory=lambda: KnownKeys(1))

    @classmethod
    def of(cls, info: wire.WorkerInfo, role: Role) -> Standing:
        return cls(
            id=info.id,
            role=role,
            fingerprint=info.fingerprint,
            page_tokens=info.page_tokens,
            max_sequences=max(1, info.max_sequences),
            pages_total=max(1, info.pages),
            token_bytes=info.token_bytes,
            pages_free=info.pages,
            keys=KnownKeys(int(info.pages * KEY_SLACK)),
        )

    def may_prefill(self) -> bool:
        return self.role != "decode"

    def may_decode(self) -> bool:
        return self.role != "prefill"

    def update(self, status: wire.Status) -> None:
        self.pages_free = status.pages_free
        self.pages_cached = status.pages_cached
        self.pages_total = max(1, status.pages_total)
        self.foreign_tokens = max(0, status.waiting_tokens - self.prefill_tokens)
        self.foreign_sequences = max(0, status.running - self.sequences - self.prompts)
        self.pace = Pace(status.prompt_rate, status.mixed_rate, status.mixed_step_s, status.decode_step_s)
        self.keys.update(status)

    def reckon(self, now: float) -> None:
        """Brings `busy` up to date, for a choice now."""
        passed = now - self.seen
        if passed <= 0:
            return
        share = math.exp(-passed / BUSY_S) if self.seen else 0.0
        self.busy = self.busy * share + (1 - share) * (self.prefill_tokens > 0)
        share = math.exp(-passed / PRESSED_S) if self.seen else 0.0
        self.pressed = self.pressed * share + (1 - share) * (self.prefill_tokens > 0)
        self.seen = now

    def charge(self, tokens: int, now: float) -> None:
        """A prompt with so many tokens to compute is sent there."""
        self.reckon(now)
        self.prefill_tokens += tokens
        self.prompts += 1

    def expect(self, *, local: bool) -> None:
        """A sequence will decode there; it comes when its prompt has been computed, here if `local`."""
        self.sequences += 1
        self.coming += not local

    def came(self) -> None:
        """Its prompt has been computed elsewhere, or will not be."""
        self.coming -= 1

    def discharge(self, tokens: int, now: float) -> None:
        """It is computed, or will not be."""
        self.reckon(now)
        self.prefill_tokens -= tokens
        self.prompts -= 1

    @property
    def load(self) -> float:
        """Sequences in proportion to the most it runs, plus the share of its pages that hold live KV."""
        busy = self.pages_total - self.pages_free - self.pages_cached
        return self.decoding / self.max_sequences + max(0, busy) / self.pages_total

    @property
    def queued(self) -> int:
        """Prompt tokens that stand before a new prompt."""
        return self.prefill_tokens + self.foreign_tokens

    @property
    def decoding(self) -> int:
        return self.sequences + self.foreign_sequences

    @property
    def disturbed(self) -> int:
        """Sequences that a prompt would meet there."""
        return self.decoding - self.coming


@dataclass(frozen=True, slots=True)
class Avoid:
    """What has just failed for a request: used again only when there is nothing else."""

    workers: frozenset[str] = frozenset()
    pairs: frozenset[tuple[str, str]] = frozenset()

    def hits(self, prefill: str, decode: str) -> bool:
        return prefill in self.workers or decode in self.workers or (prefill, decode) in self.pairs

    def but(self, prefill: str, decode: str) -> Avoid:
        return Avoid(self.workers, self.pairs | {(prefill, decode)})

    def but_worker(self, worker: str) -> Avoid:
        return Avoid(self.workers | {worker}, self.pairs)


NOTHING_TO_AVOID = Avoid()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. `prefill` and `decode` are worker ids, equal for a local one; `to_compute` are the tokens
    of the prompt that the prefill worker does not hold yet, `keys` the block keys that it will hold then; `borrowed` is
    the role that no live worker has; `helping` says that a decode worker takes a prompt off the prefill workers."""

    prefill: str
    decode: str
    to_compute: int
    borrowed: Role | None = None
    helping: bool = False
    keys: Sequence[bytes] = field(default=(), compare=False)

    @property
    def local(self) -> bool:
        return self.prefill == self.decode


CanMeet = Callable[[str, str], bool]
SecondsPerByte = Callable[[str, str], float]


def at_once(prefill: str, decode: str) -> float:
    return 0.0


def place(
    prompt: Prompt,
    standings: Iterable[Standing],
    can_meet: CanMeet,
    *,
    seconds_per_byte: SecondsPerByte = at_once,
    borrow_prefill: bool = False,
    borrow_decode: bool = False,
    help_out: bool = False,
    avoid: Avoid = NOTHING_TO_AVOID,
) -> Placement | None:
    """The best pair for `prompt` among the usable workers, or None.

    `can_meet(p, d)` says whether KV can travel from worker p to another worker d, `seconds_per_byte(p, d)` how fast (of
    one rank). The borrow flags say what may be done when no usable worker has the role; they change nothing while one
    has. `help_out` lets decode workers compute prompts that would wait long at the prefill workers.
    """
    usable = [s for s in standings if s.usable]
    prefills = [s for s in usable if s.may_prefill()]
    decodes = [s for s in usable if s.may_decode()]
    if not usable or (prefills and decodes):
        if help_out and _may_help(prefills, decodes, can_meet):
            prefills = usable
        return _pair(prompt, prefills, decodes, can_meet, seconds_per_byte, avoid)
    if (prefills and not borrow_decode) or (decodes and not borrow_prefill):
        return None
    paces = _paces(usable)
    chosen = min(usable, key=lambda s: (s.id in avoid.workers, *_prefill_key(prompt, s, paces[s.id])))
    to_compute = len(prompt) - prompt.known(chosen)
    return Placement(chosen.id, chosen.id, to_compute, "decode" if prefills else "prefill")


def _may_help(prefills: list[Standing], decodes: list[Standing], can_meet: CanMeet) -> bool:
    """Whether prompts wait at all prefill workers, and not for want of a route."""
    paces = _paces(prefills)
    if any(s.queued < HELP_WAIT_S * _rate(s, paces[s.id]) for s in prefills):
        return False
    return any(can_meet(p.id, d.id) for p in prefills for d in decodes if d is not p)


def _pair(
    prompt: Prompt,
    prefills: list[Standing],
    decodes: list[Standing],
    can_meet: CanMeet,
    seconds_per_byte: SecondsPerByte,
    avoid: Avoid,
) -> Placement | None:
    paces = _paces({s.id: s for s in (*prefills, *decodes)}.values())
    by_prefill = sorted(prefills, key=lambda s: _prefill_key(prompt, s, paces[s.id]))
    most = max((s.decoding for s in decodes), default=0) or 1
    loads = {s.id: _decode_key(prompt, s, paces[s.id], most) for s in decodes}
    second_best: Placement | None = None
    for p in by_prefill:
        fitting = [d for d in decodes if d is p or (p.may_prefill() and can_meet(p.id, d.id))]
        if not fitting:
            continue
        wanted = [d for d in fitting if not avoid.hits(p.id, d.id)]
        keys = {d.id: _with_travel(prompt, p, d, loads[d.id], seconds_per_byte) for d in wanted or fitting}
        d = _stay_or_go(p, sorted(wanted or fitting, key=lambda d: keys[d.id]), keys)
        found = Placement(
            p.id,
            d.id,
            len(prompt) - prompt.known(p),
            helping=not p.may_prefill(),
            keys=prompt.keys_for(p) if len(prefills) > 1 else (),
        )
        if wanted:
            return found
        second_best = second_best or found
    return second_best


DecodeKey = tuple[bool, float, int]


def _with_travel(
    prompt: Prompt, p: Standing, d: Standing, key: DecodeKey, seconds_per_byte: SecondsPerByte
) -> DecodeKey:
    if p is d:
        return key
    full, load, chosen = key
    tokens = len(prompt) - prompt.known(d)
    return (full, load + TRAVEL_WORTH * tokens * p.token_bytes * seconds_per_byte(p.id, d.id), chosen)


def _stay_or_go(p: Standing, fitting: list[Standing], keys: dict[str, DecodeKey]) -> Standing:
    """The best of `fitting`, or p itself when it is among them and hardly behind: what stays need not travel."""
    best = fitting[0]
    if best is p or p not in fitting:
        return best
    full, load, _ = keys[p.id]
    best_full, best_load, _ = keys[best.id]
    return p if full == best_full and load <= best_load + LOCAL_WORTH / p.max_sequences + HANDOFF_WORTH else best


def _paces(standings: Collection[Standing]) -> dict[str, Pace]:
    told = [s.pace for s in standings]
    return {s.id: s.pace.known(told) for s in standings}


def _prefill_key(prompt: Prompt, s: Standing, pace: Pace) -> tuple[float, int]:
    """Smaller is better: seconds that the prompt waits, is computed, and delays others; then turns.

    Those delayed are the prompts behind it, about as many as are before it, and the sequences that decode there.
    """
    rate = _rate(s, pace)
    harmed = HARM * s.decoding if s.may_prefill() else HARM_APART * max(1, s.disturbed)
    pressed = s.pressed if s.role == "prefill" else 0.0
    behind = s.prompts / (1.0 - min(pressed, PRESSED_MOST))
    own = (len(prompt) - prompt.known(s)) / rate
    return (s.queued / rate + own * (1.0 + THRIFT + behind + harmed * pace.slowed), s.chosen)


def _rate(s: Standing, pace: Pace) -> float:
    """Prompt tokens a second there now."""
    return pace.mixed_rate if s.disturbed > 0 else pace.prompt_rate


def _decode_key(prompt: Prompt, s: Standing, pace: Pace, most: int) -> DecodeKey:
    """Smaller is better: room for the prompt now, then load less what the known prefix is worth, then turns."""
    known = prompt.known(s)
    needed = (len(prompt) - known) // s.page_tokens + 1
    full = s.pages_free + s.pages_cached < needed or s.decoding >= s.max_sequences
    worth = PREFIX_WORTH * known / max(1, len(prompt)) / s.max_sequences
    busy = max(s.busy, min(1.0, s.queued / _rate(s, pace)))  # what is queued will take its share of the next second
    disturbance = busy * (pace.slowed + pace.lost * (1.0 - s.decoding / most))
    return (full, s.load + disturbance - worth, s.chosen)
