"""Listening sockets: those of the front, of its supervisor, which outlives it, and of workers."""

from __future__ import annotations

import errno
import os
import socket

import msgspec

from slipstream.asking import Unreachable, get
from slipstream.errors import ConfigError

BACKLOG = 2048
ANSWER_S = 1.0  # of what holds a port already, to say what it is


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket on `host`:`port` (0 takes a free port). Raises OSError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """The same for a server that a person starts: raises ConfigError that names the remedy, `flag` for another port."""
    try:
        return listening_socket(host, port)
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: this is no address of this machine ({error}).") from error
    except OSError as error:
        raise ConfigError(_reason(host, port, flag, error)) from error


def _reason(host: str, port: int, flag: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        made = " (PORT=... behind make serve)" if flag == "--port" and "MAKELEVEL" in os.environ else ""
        holder = _holder(host, port)
        return f"port {port} on {host} {holder}. Choose another with {flag}{made}, or {flag} 0 for any."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: this is no address of this machine. Use 127.0.0.1, or 0.0.0.0 for all addresses."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} on {host} needs more rights than this process has. Choose a {flag} above 1023."
    return f"cannot listen on {host} port {port}: {error.strerror}. Choose another --host or {flag}."


class _Greeting(msgspec.Struct):
    """What `/health` and `/version` of a front have in common with those of a worker: one of both."""

    status: str = ""
    version: str = ""


def _holder(host: str, port: int) -> str:
    """Who listens there already: another slipstream, where it says that it is one."""
    url = url_of(host, port)
    try:
        health = msgspec.json.decode(get(url, "/health", timeout_s=ANSWER_S)[1], type=_Greeting)
        version = msgspec.json.decode(get(url, "/version", timeout_s=ANSWER_S)[1], type=_Greeting)
    except (Unreachable, msgspec.MsgspecError, RecursionError):
        return "is in use by another program"
    if not health.status or not version.version:
        return "is in use by another program"
    return f"is in use by another slipstream ({version.version}), which serves {url}; Ctrl-C in its terminal ends it"


def url_of(host: str, port: int) -> str:
    """Where clients on this machine reach a server that listens on `host`."""
    if host in ("", "0.0.0.0"):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
