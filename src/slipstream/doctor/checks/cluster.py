"""A running cluster: does it answer, do its workers understand each other, how does KV travel, in which namespaces."""

from __future__ import annotations

from slipstream.doctor.case import Case, some
from slipstream.doctor.routes import Member
from slipstream.doctor.verdict import Remedy, Verdict, absent, check, fail, ok, warn
from slipstream.transfer.order import better
from slipstream.wire import RouteReport

_REACH = ("cluster.reachable",)
_SLOW = ("tcp",)
_FIELDS = {
    "model": "the models differ: another name, revision or set of weights",
    "kv_dtype": "the KV data types differ: answers would be garbage",
    "page_tokens": "the page sizes differ: pages of one mean nothing to the other",
    "layers": "the models differ in layers",
    "kv_heads": "the models differ in KV heads",
    "head_dim": "the models differ in head size",
}
_REMEDIES = {
    "page_tokens": "start both with the same --page-tokens",
    "kv_dtype": "start both with the same --dtype",
}


@check("cluster.reachable", "The cluster answers", causes=("network.loopback",))
def reachable(case: Case) -> Verdict:
    found = case.cluster
    if found is None:
        return _none(case)
    if found.reachable:
        return ok(f"{found.url}: {len(found.workers)} workers")
    if found.keyless:
        return fail(
            found.problem,
            wanted="the key that the server was started with",
            why="without it nothing else about it can be checked",
            remedy="give its key: --api-key KEY, or export SLIPSTREAM_API_KEY=KEY",
        )
    return fail(
        found.problem,
        wanted="a router of slipstream at that URL",
        why="nothing else about it can be checked",
        remedy="start slipstream serve, or give the URL of its front (not of a worker) with --url",
    )


@check("cluster.ready", "A request sent now would be answered", causes=(*_REACH, "cluster.workers", "cluster.layouts"))
def ready(case: Case) -> Verdict:
    found = case.cluster
    if found is None or not found.reachable:
        return _none(case)
    if found.healthy:
        return ok("/health is 200")
    return fail(
        "; ".join(found.reasons) or "/health is not 200",
        wanted="/health 200",
        why="requests wait and then get 503",
        remedy="wait while models load; else see the workers below, and slipstream doctor --log with their log",
    )


@check("cluster.workers", "Every worker is linked and well", causes=_REACH)
def workers(case: Case) -> Verdict:
    members = _members(case)
    if not members:
        return _none(case)
    ill = [f"{_name(worker)}: {worker.problem or worker.state}" for worker in members if worker.state != "live"]
    ill += [f"{_name(worker)}: {worker.problem}" for worker in members if worker.state == "live" and worker.problem]
    if not ill:
        return ok(some([f"{_name(worker)} ({worker.role})" for worker in members]))
    new = all(worker.state == "connecting" and not worker.name for worker in members if worker.state != "live")
    remedy = "check address and process of the worker; its log says why it ended (slipstream doctor --log)"
    if new and not any(worker.problem for worker in members if worker.state == "live"):  # none was ever linked
        remedy = (
            "a worker that has just been started listens after some seconds and is then found: wait, and ask again. "
            "If that does not help, check its address, whether its process runs, and its log (slipstream doctor --log)"
        )
    return fail(
        "; ".join(ill[:4]),
        wanted="every worker live",
        why="what is not linked serves nothing; its requests go to the others or wait",
        remedy=remedy,
    )


@check("cluster.versions", "One version everywhere", causes=_REACH)
def versions(case: Case) -> Verdict:
    found = sorted({worker.version for worker in _members(case) if worker.version})
    if not found:
        return _none(case)
    if len(found) == 1:
        return ok(found[0])
    return warn(
        some(found),
        wanted="one version",
        why="wire protocol and layouts may differ between versions",
        remedy="update all workers and routers to the same version",
    )


@check("cluster.layouts", "Workers understand each other's KV", causes=_REACH)
def layouts(case: Case) -> Verdict:
    members = [worker for worker in _members(case) if worker.fingerprint_text]
    if len(members) < 2:
        return absent("one worker") if members else _none(case)
    first, other = members[0], next((w for w in members if w.fingerprint_text != members[0].fingerprint_text), None)
    if other is None:
        return ok(first.fingerprint_text)
    field = _differing(first.fingerprint_text, other.fingerprint_text)
    return fail(
        f"{_name(first)} has {first.fingerprint_text}; {_name(other)} has {other.fingerprint_text}",
        wanted="the same model, KV data type and page size on both sides",
        why=_FIELDS.get(field, "their KV cannot be exchanged"),
        remedy=_REMEDIES.get(field, "start all with the same model (same files), --dtype and --page-tokens"),
    )


def _differing(mine: str, theirs: str) -> str:
    a, b = _pairs(mine), _pairs(theirs)
    return next((name for name in a if a[name] != b.get(name)), "")


def _pairs(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (part.partition("=") for part in text.split())}


@check(
    "cluster.routes",
    "KV takes the fastest way there is",
    causes=("cluster.workers", "cluster.layouts", "cluster.namespaces"),
)
def routes(case: Case) -> Verdict:
    found = [(worker, route) for worker in _members(case) for route in worker.routes]
    if not found:
        return absent("no routes between workers") if _members(case) else _none(case)
    broken = [(worker, route) for worker, route in found if route.error]
    if broken:
        worker, route = broken[0]
        return fail(
            f"{_name(worker)} -> {route.peer}: {route.error}",
            wanted="a route for every pair that may hand over",
            why="this pair cannot serve requests that are handed over",
            remedy="the message has the reason against each transport; --transport auto tries all of them",
        )
    slow = [(worker, route) for worker, route in found if route.transport in _SLOW and _local(case, worker, route)]
    if slow:
        worker, route = slow[0]
        return warn(
            f"{_name(worker)} -> {route.peer} goes over {route.transport}, {route.gb_per_s:.2f} GB/s; "
            + "; ".join(
                f"not {name}: {reason}" for name, reason in better(route.transport, route.rejected, route.rdma).items()
            ),
            wanted="shm or cuda_ipc between workers of one machine",
            why="tcp copies several times and takes CPU from the model",
            remedy="start both workers in one IPC and PID namespace, with --transport auto",
        )
    return ok(some([f"{_name(w)} -> {r.peer} {r.transport} {r.gb_per_s:.2f} GB/s" for w, r in found]))


def _local(case: Case, worker: Member, route: RouteReport) -> bool:
    """Whether both ends run on one machine, as far as their host names tell."""
    peer = next((other for other in _members(case) if other.name == route.peer), None)
    return bool(peer and peer.host == worker.host)


@check("cluster.namespaces", "Workers of this machine share their namespaces", causes=_REACH)
def namespaces(case: Case) -> Verdict:
    tree = case.system.tree
    here = [w for w in _members(case) if w.pid and w.host == case.system.hostname and tree.exists(f"/proc/{w.pid}")]
    if len(here) < 2:
        few = "fewer than two workers whose process is visible here"
        return absent(few) if _members(case) else _none(case)
    for kind, words in (("ipc", "IPC"), ("pid", "PID")):
        found = {worker.name: tree.real(f"/proc/{worker.pid}/ns/{kind}").rsplit("/", 1)[-1] for worker in here}
        known = {name: value for name, value in found.items() if "[" in value}
        if len(set(known.values())) > 1:
            return warn(
                some([f"{name} {value}" for name, value in known.items()]),
                wanted=f"one {words} namespace",
                why="CUDA IPC handles are looked up by process id, NCCL's shared memory by /dev/shm: both are lost "
                "between namespaces; slipstream hands descriptors over sockets where it can",
                remedy=Remedy(
                    host=f"start the workers' containers with --{kind}=host",
                    container=f"--{kind}=host, or --{kind}=container:NAME for the second",
                    pod="shareProcessNamespace: true, with all workers in one pod",
                ),
            )
    return ok(f"{len(here)} workers in one IPC and PID namespace")


@check("cluster.books", "The router's books are right", causes=_REACH)
def books(case: Case) -> Verdict:
    found = case.cluster
    if found is None or not found.reachable:
        return _none(case)
    if not found.faults:
        return ok("/audit finds nothing")
    return fail(
        some(list(found.faults), 3),
        wanted="no problem in /audit",
        why="this is a fault of slipstream itself",
        remedy="report it with the answer of /audit and the router's log; restart the router to go on",
    )


def _none(case: Case) -> Verdict:
    """There is no cluster whose answers could be judged, and where it was looked for."""
    if case.cluster is not None:
        return absent("it does not answer, or has no workers")
    if case.front.port == 0:
        return absent("looked for no server, since the port of the settings is 0; --url names one")
    return absent(f"looked for a server at {case.front_url} and found none; --url names another")


def _members(case: Case) -> tuple[Member, ...]:
    found = case.cluster
    return found.workers if found and found.reachable else ()


def _name(worker: Member) -> str:
    return worker.name or worker.url


CHECKS = (reachable, workers, versions, layouts, namespaces, ready, routes, books)
