"""Chooses the prefill and the decode worker of a request. Pure: no sockets, no clock.

The registry keeps one `Standing` a worker: what the worker said of itself (Status), what this router has sent there
since, and which prefixes it holds, by block key. `place` reads them and answers with a `Placement`, or None when no
pair can serve now. The caller then charges the placement to the standings (`Standing.charge_*`), so that the next
choice sees it before the worker has said anything.

Prefill goes where the fewest tokens stand before the first token: those still to compute of this prompt (known prefix
taken off) plus those already queued. That rule needs no cap against herding: a long queue outweighs a known prefix by
itself. Decode goes where sequences and KV are fewest in proportion to what the worker holds; a known prefix saves
bytes on the wire, but is worth `PREFIX_WORTH` sequences at most, so that a popular prefix cannot pile everything up
on one worker. Equal candidates take turns.

When no worker of a role is there, one of the other role is borrowed for both halves of the request: prefill and decode
then happen in one place and nothing has to travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slipstream import wire
from slipstream.kv.prefix import block_keys, root_key
from slipstream.types import Role

PREFIX_WORTH = 2.0  # sequences that a fully known prefix may outweigh when a decode worker is chosen
LOCAL_WORTH = 1.0  # sequences by which another worker must be ahead before a request leaves the one that prefills it
DECODE_COST = 16  # prompt tokens that one decoding sequence costs a prefill on the same worker
KEY_SLACK = 1.25  # block keys remembered of a worker, in multiples of its pages


class KnownKeys:
    """Block keys in one worker's prefix cache, as far as it has told. Bounded: the oldest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._keys: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

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
            if key not in self._keys:
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
            known = standing.keys.leading(self._keys_for(standing)) * standing.page_tokens if standing.keys else 0
            self._known[standing.id] = known
        return known

    def _keys_for(self, standing: Standing) -> list[bytes]:
        kind = (standing.fingerprint, standing.page_tokens)
        keys = self._keys.get(kind)
        if keys is None:
            useful = self.token_ids[: max(0, len(self.token_ids) - 1)]
            keys = block_keys(useful, standing.page_tokens, root_key(standing.fingerprint, self._salt))
            self._keys[kind] = keys
        return keys


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
    usable: bool = True
    pages_free: int = 0
    pages_cached: int = 0
    prefill_tokens: int = 0
    sequences: int = 0
    foreign_tokens: int = 0
    foreign_sequences: int = 0
    chosen: int = 0  # when it was last chosen, in placements; the longest ago wins a tie
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
        self.foreign_sequences = max(0, status.running - self.sequences)
        self.keys.update(status)

    @property
    def load(self) -> float:
        """Sequences in proportion to the most it runs, plus the share of its pages that hold live KV."""
        busy = self.pages_total - self.pages_free - self.pages_cached
        return (self.sequences + self.foreign_sequences) / self.max_sequences + max(0, busy) / self.pages_total

    @property
    def queued(self) -> int:
        """Prompt tokens that stand before a new prompt, decoding sequences counted at `DECODE_COST`."""
        return self.prefill_tokens + self.foreign_tokens + DECODE_COST * (self.sequences + self.foreign_sequences)


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
    of the prompt that the prefill worker does not hold yet; `borrowed` is the role that no live worker has."""

    prefill: str
    decode: str
    to_compute: int
    borrowed: Role | None = None

    @property
    def local(self) -> bool:
        return self.prefill == self.decode


CanMeet = Callable[[str, str], bool]


def place(
    prompt: Prompt,
    standings: Iterable[Standing],
    can_meet: CanMeet,
    *,
    borrow_prefill: bool = False,
    borrow_decode: bool = False,
    avoid: Avoid = NOTHING_TO_AVOID,
) -> Placement | None:
    """The best pair for `prompt` among the usable workers, or None.

    `can_meet(p, d)` says whether KV can travel from worker p to another worker d. The borrow flags say what may be
    done when no usable worker has the role; they change nothing while one has.
    """
    usable = [s for s in standings if s.usable]
    prefills = [s for s in usable if s.may_prefill()]
    decodes = [s for s in usable if s.may_decode()]
    if not usable or (prefills and decodes):
        return _pair(prompt, prefills, decodes, can_meet, avoid)
    if (prefills and not borrow_decode) or (decodes and not borrow_prefill):
        return None
    chosen = min(usable, key=lambda s: (s.id in avoid.workers, *_prefill_key(prompt, s)))
    to_compute = len(prompt) - prompt.known(chosen)
    return Placement(chosen.id, chosen.id, to_compute, "decode" if prefills else "prefill")


def _pair(
    prompt: Prompt, prefills: list[Standing], decodes: list[Standing], can_meet: CanMeet, avoid: Avoid
) -> Placement | None:
    by_prefill = sorted(prefills, key=lambda s: _prefill_key(prompt, s))
    decode_keys = {s.id: _decode_key(prompt, s) for s in decodes}
    by_decode = sorted(decodes, key=lambda s: decode_keys[s.id])
    second_best: Placement | None = None
    for p in by_prefill:
        fitting = [d for d in by_decode if d is p or can_meet(p.id, d.id)]
        if not fitting:
            continue
        wanted = [d for d in fitting if not avoid.hits(p.id, d.id)]
        found = Placement(p.id, _stay_or_go(p, wanted or fitting, decode_keys).id, len(prompt) - prompt.known(p))
        if wanted:
            return found
        second_best = second_best or found
    return second_best


def _stay_or_go(p: Standing, fitting: list[Standing], keys: dict[str, tuple[bool, float, int]]) -> Standing:
    """The best of `fitting`, or p itself when it is among them and hardly behind: what stays need not travel."""
    best = fitting[0]
    if best is p or p not in fitting:
        return best
    full, load, _ = keys[p.id]
    best_full, best_load, _ = keys[best.id]
    return p if full == best_full and load <= best_load + LOCAL_WORTH / p.max_sequences else best


def _prefill_key(prompt: Prompt, s: Standing) -> tuple[int, int]:
    return (len(prompt) - prompt.known(s) + s.queued, s.chosen)


def _decode_key(prompt: Prompt, s: Standing) -> tuple[bool, float, int]:
    """Smaller is better: room for the prompt now, then load less what the known prefix is worth, then turns."""
    known = prompt.known(s)
    needed = (len(prompt) - known) // s.page_tokens + 1
    full = s.pages_free + s.pages_cached < needed or s.sequences + s.foreign_sequences >= s.max_sequences
    worth = PREFIX_WORTH * known / max(1, len(prompt)) / s.max_sequences
    return (full, s.load - worth, s.chosen)
