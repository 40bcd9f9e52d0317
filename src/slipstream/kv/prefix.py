"""Which prefixes lie in which pages.

A full page is named by its block key: a hash of its own tokens and of the key before it, so that a key stands for the
whole prefix that ends with the page, and equal keys mean equal KV. The chain starts at a root that names whatever else
decides the content (model, page geometry, the request's salt). Router and workers compute the same keys.

The index knows the page of each key. A page that somebody holds stays; one that nobody holds is evictable, the least
recently used first. Holders let their pages go from the end of the chain to its start, so that children are evicted
before their parents. Where two sequences computed the same prefix at the same time a parent may still go first: its
children are then unreachable until it is computed again, and correct if they are reached, for the key says all.

What is added and removed is logged for the routers, net, bounded, and replaced by a reset when the bound is passed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16


def root_key(fingerprint: str, cache_salt: str = "") -> bytes:
    """Start of the chains of one model and layout; requests with different salts share nothing."""
    name = fingerprint.encode()
    digest = hashlib.blake2b(len(name).to_bytes(4, "little") + name + cache_salt.encode(), digest_size=KEY_BYTES)
    return digest.digest()


def extend_keys(keys: list[bytes], token_ids: Sequence[int] | NDArray[np.int64], page_tokens: int, root: bytes) -> None:
    """Appends to `keys` those of the full pages of `token_ids` that it does not cover yet."""
    first = len(keys)
    full = len(token_ids) // page_tokens
    if full <= first:
        return
    data = np.asarray(token_ids[first * page_tokens : full * page_tokens], dtype="<i4").tobytes()
    size = page_tokens * 4
    key = keys[-1] if keys else root
    blake2b = hashlib.blake2b
    for start in range(0, len(data), size):
        key = blake2b(key + data[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(key)


def block_keys(token_ids: Sequence[int], page_tokens: int, root: bytes) -> list[bytes]:
    """Keys of the full pages of `token_ids`; a last page in part has none."""
    keys: list[bytes] = []
    extend_keys(keys, token_ids, page_tokens, root)
    return keys


@dataclass(frozen=True, slots=True)
class Changes:
    """Net change of the set of keys; with `reset`, `added` is the whole set and all that was known before is void."""

    added: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    reset: bool = False


class PrefixIndex:
    """Key to page, page to key, and the order in which pages that nobody holds are given up.

    `change_bound` is the number of net changes remembered for `take_changes`.
    """

    def __init__(self, change_bound: int = 16384) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._log: dict[bytes, bool] = {}
        self._bound = change_bound
        self._overflown = False

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def evictable(self) -> int:
        return len(self._idle)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest known prefix of the chain `keys`. The caller holds them before anything is evicted."""
        found: list[int] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def insert(self, key: bytes, page: int) -> bool:
        """Names a held page. False when the key has a page already; the new one then stays nameless."""
        return bool(self.insert_all([key], [page]))

    def insert_all(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        """Names as many held pages as there are keys, one by one as `insert` does; returns how many got their name."""
        pages_of, keys_of = self._pages, self._keys
        added: list[bytes] = []
        for key, page in zip(keys, pages, strict=True):
            if key not in pages_of and page not in keys_of:
                pages_of[key] = page
                keys_of[page] = key
                added.append(key)
        self._note(added, True)
        return len(added)

    def key_of(self, page: int) -> bytes | None:
        return self._keys.get(page)

    @property
    def named(self) -> Container[int]:
        """The pages that have a key."""
        return self._keys

    def retire(self, page: int) -> None:
        """Nobody holds this page any more: it is now the most recently used of the evictable ones."""
        assert page in self._keys, f"page {page} has no key"
        self._idle[page] = None

    def revive(self, page: int) -> None:
        """An evictable page is held again."""
        del self._idle[page]

    def evict(self, count: int = 1) -> list[int]:
        """Forgets the least recently used evictable pages and returns them, in the order of their use. Raises KeyError
        when there are fewer."""
        next_idle, pages_of, take_key = self._idle.popitem, self._pages, self._keys.pop
        pages: list[int] = []
        removed: list[bytes] = []
        for _ in range(count):
            page, _ = next_idle(last=False)
            key = take_key(page)
            del pages_of[key]
            pages.append(page)
            removed.append(key)
        self._note(removed, False)
        return pages

    def keys(self) -> list[bytes]:
        return list(self._pages)

    def idle_pages(self) -> list[int]:
        """The evictable pages, the next to go first."""
        return list(self._idle)

    def take_changes(self) -> Changes:
        """What changed since the last call."""
        if self._overflown:
            changes = Changes(added=self.keys(), reset=True)
        else:
            changes = Changes(
                [k for k, there in self._log.items() if there], [k for k, t in self._log.items() if not t]
            )
        self._log.clear()
        self._overflown = False
        return changes

    def _note(self, keys: Iterable[bytes], present: bool) -> None:
        if self._overflown:
            return
        log = self._log
        for key in keys:
            if log.pop(key, present) is present:  # else it is again as it was at the last call
                log[key] = present
        if len(log) > self._bound:
            self._log.clear()
            self._overflown = True
