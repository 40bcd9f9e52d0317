"""The engine's greedy answers and logits beside those of `transformers` on the same weights: `gpu_serve.py reference`.

The reference is transformers' implementation in float32, with the very numbers that slipstream loads (dequantised where
the file is quantised). Prompts are pieces of this repository's documents, 1 to 2,000 tokens long. They are computed one
by one, then all decode together. The reference computes each prompt with the answer that was given, so every token is
compared, also behind one that differs.

The rule of near-ties. `bound` is twice the error of a logit: in bfloat16 the largest difference that transformers' own
bfloat16 makes to its float32, over all logits compared; in float32 a thousandth of the largest logit. A token counts as
equal when it is the reference's first choice. One that is not counts as a near-tie when the reference gives its own
first choice at most `bound` more than it gives this token: rounding may then decide either way, and no two
implementations need agree. Everything else is wrong. So an answer equals the reference's up to the first near-tie, and
goes on as the reference would go on from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_figures import Figures

from slipstream.config import EngineConfig
from slipstream.engine.plan import NewRow, StepPlan
from slipstream.front.tokenizer import load_tokenizer
from slipstream.model.config import ModelConfig
from slipstream.model.loader import load
from slipstream.run.engine_model import OpenedModel, open_model
from slipstream.types import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
LONGEST = 2000
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def lengths(count: int, longest: int) -> list[int]:
    """`count` lengths from 1 to `longest`, at the edges of pages and chunks first."""
    edges = [1, 2, 15, 16, 17, 31, 33, 127, 128, 129, 511, 512, 513, longest]
    rest = np.random.default_rng(5).integers(1, longest, count).tolist()
    return [length for length in [*edges, *rest] if length <= longest][:count]


def prompts(model: str, count: int, longest: int) -> list[list[int]]:
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = load_tokenizer(model, "").encode(text)
    starts = np.random.default_rng(6).integers(0, len(ids) - longest, count).tolist()
    return [ids[start : start + length] for start, length in zip(starts, lengths(count, longest), strict=False)]


def transformers_model(opened: OpenedModel, device: torch.device) -> Any:
    """transformers' model in float32 over the weights of slipstream's loader."""
    import transformers

    config: ModelConfig = opened.config
    weights = load(opened.files, config, device, torch.float32).tensors()
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    name = names[config.architecture]
    assert config.rope.kind == "default", "the reference is built for plain rotary embeddings"
    settings: dict[str, Any] = {"sliding_window": None} if name == "Mistral" else {}
    if name == "Llama":
        settings = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    shape = getattr(transformers, f"{name}Config")(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.tied,
        **settings,
    )
    with torch.device("meta"):
        shell = getattr(transformers, f"{name}ForCausalLM")(shape)
    missing, unexpected = shell.load_state_dict(weights, strict=False, assign=True)
    shell.tie_weights()
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    shell.model.rotary_emb = rotary(shell, device)
    return shell.eval()


def rotary(model: Any, device: torch.device) -> Any:
    return type(model.model.rotary_emb)(model.config).to(device)


@dataclass
class Answered:
    """Greedy tokens of each prompt, and the logits that each was chosen from [tokens, vocab], on the host."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]


class Engine:
    """slipstream's runner over a pool that holds all prompts with their answers."""

    def __init__(self, opened: OpenedModel, asked: list[list[int]], answer: int) -> None:
        layout = opened.layout
        self.opened, self.asked, self.answer = opened, asked, answer
        self._pages = [layout.pages_for(len(prompt) + answer) for prompt in asked]
        memory = torch.zeros((sum(self._pages) + 1) * layout.page_bytes, dtype=torch.uint8, device=opened.device)
        order = np.random.default_rng(0).permutation(np.arange(1, sum(self._pages) + 1))
        self._tables = np.zeros((len(asked), max(self._pages)), dtype=np.int64)
        for row, (end, count) in enumerate(zip(np.cumsum(self._pages), self._pages, strict=True)):
            self._tables[row, :count] = order[end - count : end]
        self.runner: Any = opened.runner(memory, len(asked))

    def answers(self) -> Answered:
        tokens: list[list[int]] = [[] for _ in self.asked]
        logits: list[list[torch.Tensor]] = [[] for _ in self.asked]
        rows = list(range(len(self.asked)))
        with probed(self.runner) as seen:

            def step(rows: list[int], plan: StepPlan) -> None:
                seen.clear()
                outcome = self.runner.execute(plan)
                found = seen[-1] if seen else self.runner._graphs.logits(len(rows))  # the graph's own
                for place, row in enumerate(rows):
                    tokens[row].append(int(outcome.token_ids[place]))
                    logits[row].append(found[place].to("cpu", torch.float32, copy=True))

            for row, prompt in enumerate(self.asked):
                step([row], self._plan([row], [prompt], first=True))
            for done in range(self.answer - 1):
                step(rows, self._plan(rows, [[tokens[row][-1]] for row in rows], done=done))
        return Answered(tokens, [torch.stack(each) for each in logits])

    def _plan(self, rows: list[int], fed: list[list[int]], *, first: bool = False, done: int = 0) -> StepPlan:
        """`first`: whole prompts of new sequences; else one token each behind `done` of the answers."""
        before = [0 if first else len(self.asked[row]) + done for row in rows]
        counts = [len(tokens) for tokens in fed]
        return StepPlan(
            step=1,
            token_ids=np.array([token for tokens in fed for token in tokens], dtype=np.int64),
            positions=np.concatenate([np.arange(b, b + n) for b, n in zip(before, counts, strict=True)]),
            query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            context_lens=np.array([b + n for b, n in zip(before, counts, strict=True)], dtype=np.int64),
            block_tables=self._tables[rows],
            rows=np.array(rows, dtype=np.int64),
            sample=np.ones(len(rows), dtype=np.bool_),
            new_rows=[NewRow(row, GREEDY, [], [], (), 0) for row in rows] if first else [],
        )


@contextmanager
def probed(runner: Any) -> Iterator[list[torch.Tensor]]:
    """The logits of steps that are no graphs, as they are computed."""
    seen: list[torch.Tensor] = []
    plain = runner.model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(plain(hidden).clone())
        return seen[-1]

    runner.model.logits = logits
    try:
        yield seen
    finally:
        del runner.model.logits


@torch.inference_mode()
def reference_logits(model: Any, asked: list[list[int]], answered: Answered, device: torch.device) -> list[Any]:
    """Of each prompt [tokens of the answer, vocab] in float32, each of them given the tokens before it."""
    found = []
    for prompt, tokens in zip(asked, answered.tokens, strict=True):
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
        found.append(model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu())
    return found


def compare(name: str, answered: Answered, wanted: list[torch.Tensor], error: float, figures: Figures) -> None:
    """`error` is that of a single logit."""
    equal = ties = wrong = prefix = 0
    largest_gap = 0.0
    for tokens, logits in zip(answered.tokens, wanted, strict=True):
        best, chosen = logits.max(-1).values, logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        gaps = (best - chosen).tolist()
        equal += sum(gap == 0 for gap in gaps)
        ties += sum(0 < gap <= 2 * error for gap in gaps)
        wrong += sum(gap > 2 * error for gap in gaps)
        prefix += all(gap == 0 for gap in gaps)
        largest_gap = max(largest_gap, *gaps)
    note = f"{equal} equal, {ties} near-ties, {prefix} of {len(wanted)} answers equal throughout, gap {largest_gap:.3g}"
    figures.add(f"{name} greedy tokens neither equal nor near-ties", wrong, "", most=0, note=note)


def largest_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def measure(model: str, name: str, device: str, count: int, longest: int, answer: int, figures: Figures) -> None:
    """Both dtypes of one model beside the reference."""
    torch.backends.cuda.matmul.allow_tf32 = False
    asked = prompts(model, count, longest)
    plain: Any = None
    for dtype in ("float32", "bfloat16"):
        settings: dict[str, Any] = {"max_sequences": count, "max_model_len": longest + answer, "dtype": dtype}
        opened = open_model(EngineConfig(model=model, device=device, **settings))
        answered = Engine(opened, asked, answer).answers()
        plain = plain or transformers_model(opened, opened.device)
        wanted = reference_logits(plain, asked, answered, opened.device)
        top = max(float(logits.abs().max()) for logits in wanted)
        ours = largest_difference(answered.logits, wanted)
        if dtype == "float32":
            error = 1e-3 * top
            figures.add(f"{name} float32 logits, largest difference / largest", ours / top, "", most=1e-3)
        else:
            coarse = plain.to(torch.bfloat16)
            coarse.model.rotary_emb = rotary(coarse, opened.device)  # angles stay in float32, as transformers has them
            theirs = reference_logits(coarse, asked, answered, opened.device)
            error = largest_difference(theirs, wanted)
            note = f"{ours:.3g}, transformers in bfloat16 {error:.3g}, largest logit {top:.3g}"
            figures.add(f"{name} bfloat16 logits, error / transformers' own", ours / error, "x", most=1.5, note=note)
            figures.add(f"{name} bfloat16 logits, largest difference / largest", ours / top, "", most=0.05)
        compare(f"{name} {dtype}", answered, wanted, error, figures)
        del opened, answered


def tiny_models(folder: Path) -> dict[str, str]:
    """A small random model of each architecture, with a tokenizer of bytes, for where no real one is at hand."""
    from tests.unit.tiny_models import tiny_model

    found = {}
    for architecture in ARCHITECTURES:
        sizes = {"head_dim": 64, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
        place = folder / architecture
        place.mkdir(parents=True, exist_ok=True)
        found[architecture] = str(tiny_model(place, architecture, tokenizer=True, **sizes))
    return found
