"""`slipstream generate`: one prompt, answered in the terminal by a cluster inside this process."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from slipstream import logs
from slipstream.cli.options import SettingsCommand, find_model, resolve
from slipstream.config import EngineConfig, FrontConfig, LaunchConfig
from slipstream.errors import ConfigError, InvalidRequest
from slipstream.settings import OFFLINE, Resolved
from slipstream.types import SamplingParams


@click.command("generate", cls=SettingsCommand, scope=OFFLINE)
@click.argument("model_argument", metavar="MODEL")
@click.argument("prompt", metavar="PROMPT")
@click.option("--system", metavar="TEXT", help="System message in front of the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option("--max-tokens", type=int, metavar="N", help="Longest answer.  [default: 256]")
@click.option("--temperature", type=float, metavar="X", help="0 is greedy.  [default: the model's, or 1]")
@click.option("--top-k", type=int, metavar="N", help="Choose among the N likeliest; 0 is off.")
@click.option("--top-p", type=float, metavar="X", help="Choose among the likeliest that have this share together.")
@click.option("--min-p", type=float, metavar="X", help="Leave out what is X times less likely.")
@click.option("--seed", type=int, metavar="N", help="The same seed gives the same answer.  [default: 0]")
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text.")
def command(
    model_argument: str, prompt: str, system: str | None, raw: bool, stop: tuple[str, ...], **options: Any
) -> None:
    """Answer PROMPT with MODEL in the terminal, without a server. PROMPT `-` is read from standard input.

    A model with a chat template gets the prompt as a message of the user; others continue it, as --raw does.

    \b
    slipstream generate smollm2 "Why is the sky blue?"
    slipstream generate smollm2 --raw "The sky is blue because" --max-tokens 40 --temperature 0
    """
    chosen = {name: options.pop(name) for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")}
    resolved = resolve(OFFLINE, model_argument, options)
    log = resolved.config(FrontConfig)
    logs.set_up("warning" if "log_level" not in resolved.given else log.log_level, log.log_format, "generate")
    _check(chosen)
    if raw and system:
        raise ConfigError("--system needs the chat template, which --raw leaves out; give one of them.")
    text = sys.stdin.read() if prompt == "-" else prompt
    _answer(resolved, text, system, raw, stop, {name: value for name, value in chosen.items() if value is not None})


def _check(chosen: dict[str, Any]) -> None:
    """Raises ConfigError in the words that the HTTP API has for the same field."""
    from slipstream.front.schema import check_value

    try:
        for name, value in chosen.items():
            check_value(name, value)
        if chosen["max_tokens"] == 0:
            raise InvalidRequest("max_tokens must be at least 1; 0 was given")
    except InvalidRequest as error:
        raise ConfigError(f"{error.message}.") from error


def _answer(
    resolved: Resolved, text: str, system: str | None, raw: bool, stop: tuple[str, ...], chosen: dict[str, Any]
) -> None:
    from slipstream.launch.checks import refuse_model
    from slipstream.launch.loading import Loading

    launch, engine = resolved.config(LaunchConfig), resolved.config(EngineConfig)
    find_model(engine)
    refuse_model(engine, [engine.tp])
    click.echo(f"loading {engine.model} ...", err=True)  # what follows takes as long as torch does to be imported
    from slipstream.llm import LLM

    llm = LLM(
        engine.model,
        prefill=launch.prefill,
        decode=launch.decode,
        both=launch.both or None,
        loading=Loading(engine.model, _say),
        **{
            s.name: resolved.given[s.name]
            for s in OFFLINE
            if s.name in resolved.given and _is_llm_setting(s.section, s.name)
        },
    )
    with llm:
        tokenizer = llm.tokenizer
        if raw or tokenizer.chat_template is None:
            ids = tokenizer.encode(text)
        else:
            messages = [{"role": "system", "content": system}] if system else []
            ids = llm.chat_ids([*messages, {"role": "user", "content": text}])
        if "max_tokens" not in chosen:
            chosen["max_tokens"] = llm.room(ids)
        values = {**tokenizer.sampling_defaults, **chosen}
        for piece in llm.stream(ids, msgspec.convert(values, SamplingParams, strict=False), stop=stop):
            click.echo(piece, nl=False)
        click.echo()


def _say(model: str, percent: int) -> None:
    click.echo(f"loading {model}: {percent} %", err=True)


def _is_llm_setting(section: str, name: str) -> bool:
    return section in ("engine", "transfer") and name != "model"
