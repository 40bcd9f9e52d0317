"""`slipstream doctor`: what is wrong with this machine, a configuration, a running cluster, or in a log."""

from __future__ import annotations

import sys

import click


@click.command("doctor")
@click.option("--model", metavar="MODEL", help="Check this model too: files, tokenizer, memory.")
@click.option(
    "--url",
    metavar="URL",
    help="Check the slipstream that runs there.  [default: the front's address of the settings, if one runs there]",
)
@click.option("--api-key", envvar="SLIPSTREAM_API_KEY", metavar="TEXT", help="Bearer token for URL, if it wants one.")
@click.option("--config", "config_file", metavar="FILE", help="Check this TOML file of settings.")
@click.option("--active", is_flag=True, help="Move real bytes too: between processes, over loopback, between GPUs.")
@click.option("--only", multiple=True, metavar="ID", help="Run only this check or group; may be repeated.")
@click.option("--log", metavar="FILE", help="Name the known failures in a log instead; - is standard input.")
@click.option("--docker", is_flag=True, help="Print the docker run line that this machine needs instead.")
@click.option("--list", "listed", is_flag=True, help="List all checks instead.")
@click.option("--verbose", "-v", is_flag=True, help="Show every check, not only what is wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: str | None,
    url: str | None,
    api_key: str | None,
    config_file: str | None,
    active: bool,
    only: tuple[str, ...],
    log: str | None,
    docker: bool,
    listed: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Say what is wrong, why it matters here, and what to do about it.

    Looks at containers and device files, limits, driver and GPUs, peer access, RDMA, network, packages, model and
    configuration, and at a slipstream that runs here. Needs no root and never hangs. Exit code 1 when something fails.

    \b
    slipstream doctor
    slipstream doctor --active --model ./my-model
    slipstream doctor --log server.log
    slipstream doctor --docker
    """
    if sum(map(bool, (log, docker, listed))) > 1:
        raise click.UsageError("--log, --docker and --list are different commands; give one of them.")
    if log:
        sys.exit(_read_log(log, as_json))
    if listed:
        _list(as_json)
        return
    from slipstream.doctor import case, live, run, show

    wish = case.Wish(model=model or "", url=url or "", config_file=config_file or "")
    checks = run.select(only, active)
    patient = case.make(live.system(api_key or ""), wish)
    if docker:
        from slipstream.doctor import docker as line

        click.echo(line.json_text(patient) if as_json else line.text(patient))
        return
    found = run.diagnose(patient, checks)
    click.echo(show.json_text(found) if as_json else show.text(found, verbose))
    sys.stdout.flush()
    sys.exit(1 if found.failed else 0)


def _list(as_json: bool) -> None:
    import msgspec

    from slipstream.doctor.checks import CHECKS

    if as_json:
        rows = [{"id": c.id, "group": c.group, "title": c.title, "active": c.active} for c in CHECKS]
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    else:
        click.echo("\n".join(f"{check.id:30} {check.title}{' (--active)' if check.active else ''}" for check in CHECKS))


def _read_log(name: str, as_json: bool) -> int:
    from slipstream import pasted
    from slipstream.doctor import log

    with pasted.opened(name) as file:
        found = log.read(pasted.lines(file))
    click.echo(log.json_text(found) if as_json else log.text(found, name))
    return 1 if found.failures else 0
