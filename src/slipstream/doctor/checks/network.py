"""Addresses, ports, proxies: what HTTP, messages and tcp transfers between workers need."""

from __future__ import annotations

import ipaddress
import re

from slipstream.doctor.case import Case, some
from slipstream.doctor.verdict import Remedy, Verdict, absent, check, fail, ok, unchecked, warn

_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_IGNORED = ("no_proxy", "NO_PROXY")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "SGLANG_LOCAL_IP_NIC")
_HOSTS = ("SLIPSTREAM_HOST", "SGLANG_HOST_IP", "HOST_IP", "VLLM_HOST_IP", "MC_TCP_BIND_ADDRESS")
_BRIDGES = re.compile(r"^(docker|br-|virbr|cni|flannel|cali|veth|kube)")
_FEW_PORTS, _SCARCE = 1000, 0.5


@check("network.loopback", "The loopback interface is up")
def loopback(case: Case) -> Verdict:
    if "lo" not in case.system.addresses:
        return unchecked("there is no interface called lo")
    if "lo" not in case.system.down:
        return ok("up")
    return fail(
        "lo is down",
        wanted="lo up, with 127.0.0.1",
        why="router and workers of one machine talk over it: nothing connects",
        remedy="ip link set lo up (a new network namespace starts without it)",
    )


@check("network.port", "The front's port is free", causes=("network.loopback",))
def port(case: Case) -> Verdict:
    front = case.front
    if front.port == 0:
        return ok("any free one")
    reason = case.system.bind(front.host, front.port)
    if not reason:
        return ok(f"{front.host}:{front.port}")
    if reason == "in use":
        if case.cluster is not None and (case.cluster.reachable or case.cluster.keyless):
            return ok(f"{front.host}:{front.port} is used by a running slipstream")
        return warn(
            f"{front.host}:{front.port} is in use by another program",
            wanted="a free port",
            why="slipstream serve refuses to start on it",
            remedy="choose another with --port (SLIPSTREAM_PORT), or --port 0 for any",
        )
    return fail(
        f"{front.host}:{front.port}: {reason}",
        wanted="a port that this process may open",
        why="slipstream serve cannot listen there",
        remedy="use an address of this machine for --host, and a --port above 1023",
    )


@check("network.free-ports", "Ports that the system hands out", causes=("network.loopback",))
def free_ports(case: Case) -> Verdict:
    first, last = _range(case)
    if first is None or last is None:
        return unchecked("/proc/sys/net/ipv4/ip_local_port_range is not shown")
    count = last - first + 1
    reason = case.system.bind("127.0.0.1", 0)
    if not reason and count >= _FEW_PORTS:
        return ok(f"{first} to {last}")
    return (fail if reason or count < 32 else warn)(
        f"{first} to {last}" + (f": {reason}" if reason else f", {count} ports"),
        wanted="some thousands, such as 32768 to 60999",
        why="workers take free ports for HTTP, messages and transfers, and each connection takes another",
        remedy=Remedy(
            text="sysctl net.ipv4.ip_local_port_range='32768 60999'; or fix ports with --port, --wire-port, --tcp-port"
        ),
    )


@check("network.used-ports", "Ports that closed connections hold", causes=("network.free-ports",))
def used_ports(case: Case) -> Verdict:
    first, last = _range(case)
    if first is None or last is None:
        return unchecked("the range is not shown")
    told = re.search(r"^TCP:.* tw (\d+)", case.system.tree.read("/proc/net/sockstat") or "", re.MULTILINE)
    if told is None:
        return unchecked("/proc/net/sockstat is not shown")
    waiting = int(told.group(1))
    if waiting < _SCARCE * (last - first + 1):
        return ok(f"{waiting} in TIME_WAIT")
    return warn(
        f"{waiting} of {last - first + 1} in TIME_WAIT",
        wanted="less than half of the range",
        why="new connections then fail with `Cannot assign requested address`",
        remedy="keep connections open instead of one a request; widen net.ipv4.ip_local_port_range",
    )


def _range(case: Case) -> tuple[int | None, int | None]:
    words = (case.system.tree.read("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 and all(word.isdigit() for word in words) else (None, None)


@check("network.proxy", "Local calls do not go to a proxy")
def proxy(case: Case) -> Verdict:
    asked = case.env(*_PROXIES)
    if not asked:
        return ok("no proxy set")
    without = {entry.strip().lower() for _, value in case.env(*_IGNORED) for entry in value.split(",")}
    missing = [name for name in ("127.0.0.1", "localhost") if not _ignored(name, without)]
    if not missing:
        return ok(f"{asked[0][0]} is set, local addresses are left out of it")
    return warn(
        f"{asked[0][0]}={asked[0][1]}, and no_proxy lacks {' and '.join(missing)}",
        wanted="no_proxy=localhost,127.0.0.1 and the addresses of the workers",
        why="slipstream's own calls ignore proxies, but curl and client libraries send requests for "
        f"http://{case.front.host}:{case.front.port} to it: 403, 503 or a hang",
        remedy=Remedy(
            host="export no_proxy=localhost,127.0.0.1,::1",
            container="-e no_proxy=localhost,127.0.0.1,::1, or leave the proxy out of the container's environment",
            pod="add no_proxy to the pod's environment",
        ),
    )


def _ignored(name: str, without: set[str]) -> bool:
    if name in without or "*" in without:
        return True
    for entry in without:
        if "/" in entry and name[0].isdigit():
            try:
                if ipaddress.ip_address(name) in ipaddress.ip_network(entry, strict=False):
                    return True
            except ValueError:
                continue
    return False


@check("network.interface", "Interfaces named in the environment exist")
def interface(case: Case) -> Verdict:
    asked = case.env(*_INTERFACES)
    here = case.system.addresses
    if not asked or not here:
        return absent("no variable names an interface" if not asked else "interfaces are not shown")
    wrong = [f"{variable}={value}" for variable, value in asked if not _matches(value, list(here))]
    if not wrong:
        return ok(some([f"{name}={value}" for name, value in asked]))
    return fail(
        f"{some(wrong)} matches none of {some(sorted(here))}",
        wanted="an interface of this machine",
        why="collectives end with `no socket interface found`; names differ between hosts",
        remedy="correct or unset the variable; slipstream itself takes addresses, not interface names",
    )


def _matches(value: str, here: list[str]) -> bool:
    if value.startswith("^"):
        return True
    exact = value.startswith("=")
    return any(
        name == want if exact else name.startswith(want) for want in value.lstrip("=").split(",") for name in here
    )


@check("network.host", "The address that others are told is one of this machine's")
def host(case: Case) -> Verdict:
    asked = case.env(*_HOSTS)
    mine = {address: name for name, found in case.system.addresses.items() for address in found}
    if not asked or not mine:
        return absent("no variable names an address" if not asked else "addresses are not shown")
    for variable, value in asked:
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            continue
        if address.is_unspecified or address.is_loopback:
            continue
        name = mine.get(str(address))
        if name is None:
            return fail(
                f"{variable}={value} is no address of this machine",
                wanted=f"one of {some([a for a in mine if not a.startswith(('127.', '::1', 'fe80'))]) or 'none is up'}",
                why="peers are told this address and reach nobody, or another machine",
                remedy=f"correct or unset {variable}",
            )
        if _BRIDGES.match(name):
            return warn(
                f"{variable}={value} belongs to {name}, a bridge inside this machine",
                wanted="an address that leads to the peers",
                why="other machines cannot reach it",
                remedy=f"set {variable} to the address of the interface with the default route",
            )
    return ok(some([f"{name}={value}" for name, value in asked]))


@check("network.hostname", "The host name's address")
def hostname(case: Case) -> Verdict:
    found = case.system.resolve(case.system.hostname)
    if not found:
        return ok(f"{case.system.hostname} has no address; slipstream does not ask for it")
    inside = [address for address in found if ipaddress.ip_address(address.split("%")[0]).is_loopback]
    asked = ipaddress_or_none(case.front.host)
    if len(inside) < len(found) or asked is None or asked.is_loopback:
        return ok(f"{case.system.hostname} is {some(list(found))}")
    return warn(
        f"{case.system.hostname} is only {some(inside)}, and --host is {case.front.host}",
        wanted="the machine's own address in /etc/hosts or the name service",
        why="rendezvous libraries (gloo, NCCL bootstrap) take the loopback address and other hosts are refused",
        remedy="put the machine's address before 127.0.1.1 in /etc/hosts, or set GLOO_SOCKET_IFNAME",
    )


def ipaddress_or_none(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address, or None for a name."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


CHECKS = (loopback, port, free_ports, used_ports, proxy, interface, host, hostname)
