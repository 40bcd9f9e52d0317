"""Serving under load on two GPUs: prefill and decode apart against two workers that do both, at the same loads.

    python scripts/gpu_serving.py --out FOLDER [--only 8b/apart,1.5b] [--seconds 16] [--seeds 2] [--budget 570] [--plan]

For each model (1.5B and 8B shapes, random weights, a byte tokenizer) and each arrangement it starts `slipstream serve`
once and measures in parts, in this order:

    ready       seconds from the command to the line that says so; the first request against the tenth. Kernels are
                kept in a folder of this run: the first server of a model finds none of its, later ones find all
    RATE        `slipstream bench serve` at each rate of the table, exactly rate x seconds requests a seed, with what
                the workers' metrics grew by meanwhile
    long        time to first token of lone prompts of 8,192 tokens
    exposure    of such prompts: how much later the second token comes than a decode step behind the first
    turns       second turns behind a history of 8,192 tokens: first token against a prompt that nobody has seen, bytes
                moved against the new tokens
    disturbed   gaps between tokens of streams that decode, alone and while prompts of 8,192 tokens arrive
    cached      the same streams while such prompts are handed over whole, but not computed (`gpu_cached.py`)

Arrangements: `apart` (`--prefill cuda:0 --decode cuda:1`: all but the last two), `both` (`--both cuda:0,1`: ready,
rates and long), `strict` (apart with `--strict-roles`: disturbed; by name also the others), `bare` (the same, piece by
piece, the decode worker without a prefix cache: cached, by name). `--only` takes pieces of MODEL/ARRANGEMENT/PART, such
as 8b, apart/4 or 1.5b/both/ready; a part that is named runs where it does not by default. Of requests that are sent one
by one (ready, exposure, turns) timelines are kept, and some printed: event@where, milliseconds from its coming + took.

With one GPU, or with `--one-card`, both workers of `apart`, `strict` and `bare` share it and `both` is one worker; by
default ready, exposure and turns run (of `both` ready). Names of results end with `-one-card`, and there are no goals.

Every part has a time limit, none begins that would not fit into the budget, and results are written after each, so
that whatever cuts this off leaves what was measured: FOLDER/results.json, FOLDER/figures.jsonl (beside their goals),
FOLDER/requests.json.gz (single requests), FOLDER/*.log (what the servers said). Without GPUs, or with `--tiny`, the
same runs with a tiny model on the CPU, for a dry run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from gpu_loads import ELSEWHERE, MODELS, SLO, TINY, Model, Results, Run, loads, measure, parts_of
from gpu_models import model_folder
from gpu_servers import Pieces, Served, Server, gpus, say

START_S = 20.0  # of a server
ARRANGEMENTS = ("apart", "strict", "both", "bare")
BY_DEFAULT: dict[str, tuple[str, ...]] = {
    "apart": ("ready", "rates", "long", "exposure", "turns"),
    "strict": ("disturbed",),
    "both": ("ready", "rates", "long"),
    "bare": (),
}
ON_ONE_CARD: dict[str, tuple[str, ...]] = {
    "apart": ("ready", "exposure", "turns"),
    "strict": (),
    "both": ("ready",),
    "bare": (),
}
SHARED_KV = ("--kv-tokens", "262144")  # of each of two workers on a card: by its free memory neither sees the other


@dataclass(frozen=True)
class Place:
    """Where workers run: devices of prefill and decode, and of workers that do both."""

    prefill: str
    decode: str
    both: str
    flags: tuple[str, ...] = ()


TWO, ONE = Place("cuda:0", "cuda:1", "cuda:0,1"), Place("cuda:0", "cuda:0", "cuda:0", SHARED_KV)
TWO_CPU, ONE_CPU = Place("cpu", "cpu", "2xcpu"), Place("cpu", "cpu", "cpu")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-serving"))
    parser.add_argument("--only", default="", help="pieces of MODEL/ARRANGEMENT/PART, separated by commas")
    parser.add_argument("--skip", default="", help="parts that are left out, such as disturbed")
    parser.add_argument("--seconds", type=float, default=16.0, help="how long each rate is sent, for each seed")
    parser.add_argument("--seeds", type=int, default=2, help="repetitions of each rate with other arrivals and lengths")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--apart", default="", help="further flags of serve for prefill and decode apart (and strict)")
    parser.add_argument("--both", default="", help="further flags of serve for workers that do both")
    parser.add_argument("--one-card", action="store_true", help="as with one GPU, also where there are more")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--plan", action="store_true", help="only say what would be measured and how long it takes")
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    cards = 0 if arguments.tiny else gpus()
    tiny = arguments.tiny or (not arguments.plan and cards == 0)
    one_card = arguments.one_card or cards == 1
    place = (ONE_CPU if one_card else TWO_CPU) if tiny else ONE if one_card else TWO
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.out, arguments.budget, one_card)
    total = 0.0
    for model in TINY if tiny else MODELS:
        kernels = arguments.out / "kernels" / model.name
        for arrangement in ARRANGEMENTS:
            planned = parts_of(model, arguments.seconds, arguments.seeds)
            parts = [part for part in planned if (part == "cached") == (arrangement == "bare")]
            usual = ON_ONE_CARD if one_card else BY_DEFAULT
            wanted = selected(model.name, arrangement, parts, arguments.only, arguments.skip, usual)
            if not wanted:
                continue
            total += START_S + sum(planned[part] for part in wanted)
            if arguments.plan:
                parts = ", ".join(f"{part} {planned[part]:.0f} s" for part in wanted)
                say(f"{model.name}/{arrangement}: start {START_S:.0f} s, {parts}")
            elif results.left_s < START_S + min(planned[part] for part in wanted):
                say(f"== {model.name}/{arrangement} left out: {results.left_s:.0f} s are left")
            else:
                with served(model, arrangement, place, arguments, kernels) as server:
                    first = not any(part.startswith(f"{model.name}/") for part in results.parts)
                    run = Run(model, arrangement, server, results, arguments.seconds, arguments.seeds, first)
                    if server.url:
                        measure(run, wanted, planned)
                    else:
                        results.keep(f"{run.name}/ready", {"problem": "not ready; see its log"})
                        results.figures.add(f"{run.name} ready", None, "s", most=20)
        shutil.rmtree(kernels, ignore_errors=True)
    if arguments.plan:
        say(f"together about {total:.0f} s")
        return 0
    if not total:
        say("nothing of this runs here unless it is named down to the part, such as apart/long: see --help")
    summary(results)
    return 0 if results.parts and not any("problem" in part for part in results.parts.values()) else 1


def served(model: Model, arrangement: str, place: Place, arguments: argparse.Namespace, kernels: Path) -> Served:
    folder = model_folder(arguments.out / "models" / model.name, model.shape, **model.changes)
    more = (arguments.both if arrangement == "both" else arguments.apart).split()
    flags = [str(folder), "--load-format", "dummy", "--served-model-name", "model", "--port", "0"]
    flags += [*model.flags, *place.flags]
    log, environment = arguments.out / f"{model.name}-{arrangement}.log", {"TRITON_CACHE_DIR": str(kernels.resolve())}
    if arrangement == "bare":
        prefill = [*flags, *more, "--role", "prefill", "--name", "prefill-0", "--device", place.prefill]
        decode = [*flags, *more, "--role", "decode", "--name", "decode-0", "--device", place.decode]
        return Pieces(["--strict-roles"], [prefill, [*decode, "--no-prefix-cache"]], log, environment)
    devices = ["--prefill", place.prefill, "--decode", place.decode, *["--strict-roles"] * (arrangement == "strict")]
    return Server([*flags, *(["--both", place.both] if arrangement == "both" else devices), *more], log, environment)


def selected(
    model: str,
    arrangement: str,
    parts: list[str],
    only: str,
    skip: str,
    by_default: dict[str, tuple[str, ...]] = BY_DEFAULT,
) -> list[str]:
    """Parts that `only` names a piece of; of an arrangement that is not named down to the part, those by default."""
    pieces, skipped = [text for text in only.split(",") if text], skip.split(",")
    special = ("ready", "long", "exposure", "turns", "disturbed", "cached")
    chosen = []
    for part in parts:
        whole = f"/{model}/{arrangement}/{part}/"
        named = [piece for piece in pieces if f"/{piece}/" in whole]
        exactly = any(piece.split("/")[-1] == part for piece in named)
        usual = (part if part in special else "rates") in by_default[arrangement]
        if part not in skipped and (exactly or (usual and (named or not pieces))):
            chosen.append(part)
    return chosen


def summary(results: Results) -> None:
    """One line a load, with what another server reached, in the same order of figures."""
    say("\nms: first token p50 / p99, between tokens p50 / p99; goodput at " + SLO)
    for part, value in results.parts.items():
        for key, load in loads(value):
            for row in load["rates"]:
                ttft, itl = row["ttft"], row["itl"]
                good = f", goodput {row['good']['value']:.2f}" if row.get("good") else ""
                say(
                    f"{part:24} {key:10} {ttft['p50']:7.1f} / {ttft['p99']:7.1f}, {itl['p50']:6.2f} / {itl['p99']:6.2f}"
                    f"{good}, {row['ok']} of {row['requests']}, {row['output_tokens_per_s']:.0f} tokens/s"
                )
    for (model, rate), others in ELSEWHERE.items():
        if any(part.startswith(f"{model}/") and part.endswith(f"/{rate:g}") for part in results.parts):
            say(f"elsewhere {model:4} {rate:3g}/s: " + "; ".join(f"{kind} {other}" for kind, other in others.items()))


if __name__ == "__main__":
    sys.exit(main())
