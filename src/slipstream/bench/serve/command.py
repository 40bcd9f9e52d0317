"""`slipstream bench serve`: loads a server and says how it did; or shows earlier results side by side."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from slipstream import outfile
from slipstream.bench.plot import check_path
from slipstream.bench.report import write_json
from slipstream.bench.serve import report as reports
from slipstream.bench.serve.arrivals import KINDS
from slipstream.bench.serve.figures import Slo, seconds
from slipstream.bench.serve.load import Progress as LoadProgress
from slipstream.bench.serve.session import Session, Settings
from slipstream.bench.serve.work import MIXES, Conversations, Range, Ranges, Trace, Work
from slipstream.errors import ConfigError

INTERRUPTED = 130  # exit code of what Ctrl-C has ended
WORKLOADS = ("random", *MIXES)
ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d+(/.*)?")  # host:port, with or without a path


def work_of(name: str, input: str, output: str, shared: int, groups: int, block: int) -> Work:
    """The workload of that name, or in that file. Raises ConfigError."""
    if name == "random":
        return Ranges(Range.parse(input, "--input"), Range.parse(output, "--output"), shared, groups)
    if name in MIXES:
        return MIXES[name]
    path = Path(name)
    if path.suffix == ".jsonl":
        return Trace.load(path, block)
    if path.suffix == ".json":
        return Conversations.load(path)
    raise ConfigError(
        f"--workload {name!r} is neither one of {', '.join(WORKLOADS)} nor a file: traces end in .jsonl, conversations "
        "in .json."
    )


def numbers(text: str, flag: str) -> tuple[float, ...]:
    """`4,8,12`. Raises ConfigError."""
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found or min(found) <= 0:
        raise ConfigError(f"{flag} {text!r} is no list of numbers above 0; write them like 4,8,12.")
    return found


def headers_of(given: tuple[str, ...], api_key: str) -> dict[str, str]:
    found = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for header in given:
        name, colon, value = header.partition(":")
        if not colon or not name.strip() or "\n" in header or "\r" in header:
            raise ConfigError(f"--header {header!r} is no header; write it like 'X-Name: value'.")
        found[name.strip()] = value.strip()
    return found


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[str, LoadProgress], None]]:
    """Shows the state of a load while it runs; on anything but a terminal nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1, state="")

        def show(name: str, now: LoadProgress) -> None:
            state = f"{now.sent}/{now.total} sent, {now.sent - now.finished} open, {now.failed} failed"
            bar.update(task, description=name, completed=now.finished, total=now.total, state=state)

        yield show


@click.command(short_help="Load a server that speaks the OpenAI API.")
@click.argument("words", nargs=-1, metavar="[URL | FILE...]")
@click.option("--url", default="", help="The server, such as http://127.0.0.1:8000 (with or without /v1), by name.")
@click.option("--model", default="", help="Its model. Default: the first that it names.")
@click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True)
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", help="Sent as a bearer token. Default: OPENAI_API_KEY.")
@click.option("--header", multiple=True, help="A further header, 'Name: value'; may be given again.")
@click.option(
    "--workload", default="random", show_default=True, help=f"{', '.join(WORKLOADS)}, or a file: .jsonl trace, .json."
)
@click.option("--input", default="512-2048", show_default=True, help="Prompt tokens of random: a range or a number.")
@click.option("--output", default="64-256", show_default=True, help="Answer tokens of random.")
@click.option("--shared-prefix", default=0, help="Tokens at the start of random prompts that others have too.")
@click.option("--prefix-groups", default=1, show_default=True, help="How many different shared prefixes.")
@click.option("--trace-block", default=512, show_default=True, help="Tokens of one hash_id of a trace.")
@click.option("--max-input", default=0, help="Longer prompts are cut to so many tokens.")
@click.option("--max-output", default=0, help="Longer answers are cut to so many tokens.")
@click.option("--arrivals", type=click.Choice(KINDS), default=None, help="Default: trace for a trace, else poisson.")
@click.option("--rate", default="1", show_default=True, help="Asked rate, requests a second; several as 4,8,12.")
@click.option("--speed", default="1", show_default=True, help="How many times as fast a trace is replayed; 1,2,4.")
@click.option("--variation", default=2.0, show_default=True, help="Of burst: spread of gaps over their mean.")
@click.option("--duration", default="30s", show_default=True, help="How long requests are sent, at each rate.")
@click.option("--requests", default=0, help="Send so many at each rate, instead of --duration.")
@click.option("--warmup", default=10, show_default=True, help="Requests before these, at the same rate, not measured.")
@click.option("--seeds", default=1, show_default=True, help="Repetitions with other arrivals and lengths.")
@click.option("--seed", default=0, show_default=True, help="The first seed.")
@click.option("--slo", default="", help="Bounds for goodput: ttft=1s,tpot=10ms (also itl, the longest gap, and e2e).")
@click.option("--timeout", default="600s", show_default=True, help="For one answer.")
@click.option("--drain", default="60s", show_default=True, help="How long after the last request answers may take.")
@click.option("--temperature", default=0.0, show_default=True, help="Below 0: the server's default.")
@click.option("--usage", type=click.Choice(["none", "final", "every"]), default=None, help="Token counts in streams.")
@click.option("--salt", default=None, type=int, help="Makes the prompts; a random one, so that no cache knows them.")
@click.option("--label", default="", help="Name of this result in tables and plots.")
@click.option("--raw", is_flag=True, help="Put the gaps between all tokens into the JSON file.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None, help="Write the results here.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), default=None, help="Draw curves: .png or .svg.")
def command(words: tuple[str, ...], url: str, **options) -> None:
    """Load the server at URL, which speaks the OpenAI API, in an open loop, and say how it did.

    With FILEs, results of earlier calls (--json), nothing is sent: they are shown side by side.

    \b
    slipstream bench serve http://127.0.0.1:8000 --rate 4,8,12 --slo ttft=1s,tpot=10ms --json pd.json
    slipstream bench serve pd.json colocated.json --plot curves.svg
    """
    plot_path, json_path = options.pop("plot_path"), options.pop("json_path")
    url, files = asked_for(words, url)
    if json_path:
        outfile.check(json_path)
    if plot_path:
        check_path(plot_path)
    whole = True
    console = outfile.terminal(160, highlight=False)
    if files:
        found = [reports.load_report(path) for path in files]
        reports.print_reports(found, console)
    else:
        report, whole = measure(url, options, console)
        found = [report]
    if json_path and not files:
        write_json(found[0], json_path)
    if plot_path:
        reports.plot(found, plot_path)
    if not whole:
        raise SystemExit(INTERRUPTED)
    if not files and not any(row.ok for row in found[0].rates):
        raise SystemExit(1)


def asked_for(words: tuple[str, ...], url: str) -> tuple[str, list[Path]]:
    """The server to load, by --url or as the only word, or the files to compare. Raises ConfigError."""
    urls = [word for word in words if "://" in word or (ADDRESS.fullmatch(word) and not Path(word).exists())]
    files = [Path(word) for word in words if word not in urls]
    urls += [url] if url else []
    if len(urls) > 1:
        raise ConfigError(f"give one server to load; {' and '.join(urls)} were given.")
    if urls and files:
        raise ConfigError(
            f"give either a server to load ({urls[0]}), or files of earlier results to compare "
            f"({', '.join(map(str, files))}), not both."
        )
    if not urls and not files:
        raise ConfigError(
            "which server? Give its address, as in: slipstream bench serve http://127.0.0.1:8000; or files that --json "
            "has written, to compare them."
        )
    return "".join(urls), files


def measure(url: str, options: dict, console: Console) -> tuple[reports.ServeReport, bool]:
    """Runs all loads that the options ask for; prints each as it ends and all at the end.

    Ctrl-C ends it with what was measured by then, and with False.
    """
    session = Session(settings_of(url, options), lambda text: console.print(text))
    with progress_bar(Console(stderr=True)) as show:
        try:
            report, whole = run(session.run(show)), True
        except KeyboardInterrupt:
            report, whole = session.interrupted(), False
    if report is None:
        raise click.Abort
    reports.print_reports([report], console)
    return report, whole


def run(work):
    """On the fast event loop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def settings_of(url: str, options: dict) -> Settings:
    work = work_of(
        options["workload"],
        options["input"],
        options["output"],
        options["shared_prefix"],
        options["prefix_groups"],
        options["trace_block"],
    )
    arrivals = options["arrivals"] or ("trace" if isinstance(work, Trace) else "poisson")
    if arrivals == "trace" and not isinstance(work, Trace):
        raise ConfigError("--arrivals trace needs the times of a trace: give one with --workload FILE.jsonl.")
    for name in ("shared_prefix", "max_input", "max_output", "requests", "warmup", "seed"):
        if options[name] < 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {options[name]}; it cannot be below 0.")
    if min(options["seeds"], options["prefix_groups"], options["trace_block"]) < 1:
        raise ConfigError("--seeds, --prefix-groups and --trace-block must be at least 1.")
    return Settings(
        url=url,
        model=options["model"],
        api=options["endpoint"],
        headers=headers_of(options["header"], options["api_key"]),
        work=work,
        arrivals=arrivals,
        rates=numbers(options["speed"], "--speed") if arrivals == "trace" else numbers(options["rate"], "--rate"),
        variation=options["variation"],
        duration_s=seconds(options["duration"], "--duration"),
        requests=options["requests"],
        warmup=options["warmup"],
        seeds=tuple(range(options["seed"], options["seed"] + options["seeds"])),
        slo=Slo.parse(options["slo"]) if options["slo"] else None,
        timeout_s=seconds(options["timeout"], "--timeout"),
        drain_s=seconds(options["drain"], "--drain"),
        temperature=options["temperature"] if options["temperature"] >= 0 else None,
        usage=options["usage"],
        salt=options["salt"] if options["salt"] is not None else secrets.randbits(48),
        max_input=options["max_input"],
        max_output=options["max_output"],
        label=options["label"],
        raw=options["raw"],
    )
