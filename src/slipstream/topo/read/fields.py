"""Values that several tools print in their own words: port states, link layers, numbers, GIDs.

Each function takes the text of a value (None: not shown) and returns the common form, or None with a warning when the
text is no such value.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Literal

from slipstream.topo.read.text import Notes

STATES = ("DOWN", "INIT", "ARMED", "ACTIVE")
_PHYS = {
    "NOP": "NOP",
    "SLEEP": "SLEEP",
    "POLLING": "POLLING",
    "DISABLED": "DISABLED",
    "TRAINING": "TRAINING",
    "PORTCONFIGURATIONTRAINING": "TRAINING",
    "PORTCONFIGTRAINING": "TRAINING",
    "LINKUP": "LINK_UP",
    "LINKERRORRECOVERY": "LINK_ERROR_RECOVERY",
    "LINKERRORRECOVER": "LINK_ERROR_RECOVERY",
    "PHYTEST": "PHY_TEST",
}


def port_state(where: str, text: str | None, notes: Notes) -> str | None:
    """ACTIVE out of "PORT_ACTIVE (4)", "4: ACTIVE", "Active" or "ACTIVE"."""
    word = _word(text)
    if word is None:
        _empty(where, "state", text, notes)
        return None
    word = word.removeprefix("PORT").removeprefix("_").replace("INITIALIZING", "INIT").replace("INITIALIZE", "INIT")
    if word not in STATES:
        notes.warn("bad-value", f"{where}: {text!r} is no port state")
        return None
    return word


def phys_state(where: str, text: str | None, notes: Notes) -> str | None:
    """LINK_UP out of "LINK_UP (5)", "5: LinkUp", "LinkUp"."""
    word = _word(text)
    if word is None:
        _empty(where, "physical state", text, notes)
        return None
    state = _PHYS.get(word.replace("_", ""))
    if state is None:
        notes.warn("bad-value", f"{where}: {text!r} is no physical state")
    return state


def layer(where: str, text: str | None, notes: Notes) -> Literal["InfiniBand", "Ethernet"] | None:
    if text is None:
        return None
    if text == "InfiniBand":
        return "InfiniBand"
    if text == "Ethernet":
        return "Ethernet"
    notes.warn("bad-value", f"{where}: {text!r} is no link layer")
    return None


def number(where: str, what: str, text: str | None, notes: Notes) -> int | None:
    """A decimal or 0x number."""
    if text is None:
        return None
    if re.fullmatch(r"\d+|0x[0-9a-fA-F]+", text):
        return int(text, 0) if text.startswith("0x") else int(text)
    notes.warn("bad-value", f"{where}: {what} {text!r} is no number")
    return None


def gid_value(where: str, text: str, notes: Notes) -> str | None:
    """A GID in its long form of eight groups."""
    try:
        return ipaddress.IPv6Address(text).exploded
    except ValueError:
        notes.warn("bad-value", f"{where}: {text!r} is no GID")
        return None


def device_name(name: str, notes: Notes) -> None:
    """Warns of a name that no system gives to a device: a part of it is missing, or something has been added."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.\-]*", name):
        notes.warn("bad-value", f"{name!r} is no name of a device")


def netdev_name(where: str, name: str | None, notes: Notes) -> None:
    """The same of a network device."""
    if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:@\-]*", name):
        notes.warn("bad-value", f"{where}: {name!r} is no name of a network device")


def _empty(where: str, what: str, text: str | None, notes: Notes) -> None:
    if text is not None:
        notes.warn("bad-value", f"{where}: {what} without a value")


def _word(text: str | None) -> str | None:
    if text is None or not text.strip():
        return None
    return re.sub(r"^\d+:\s*|\s*\(\d+\)\s*$", "", text.strip()).strip().upper()
