"""What the GPU scripts share about models: shapes, folders with random weights, opened models, times in CUDA graphs.

Shapes are those of `slipstream bench engine` (Qwen2.5-1.5B, Llama-3.1-8B) and a tiny one; the tokenizer has one token a
byte, so that any list of ids below 250 is a prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from slipstream.bench.engine import SHAPES as REAL_SHAPES

TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 16384,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {"tiny": TINY, **REAL_SHAPES}


def model_folder(folder: Path, shape: str, **changes: Any) -> Path:
    """A folder with the config of that shape and a tokenizer of bytes, without weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    common = {"rms_norm_eps": 1e-6, "eos_token_id": 1, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**common, **SHAPES[shape], **changes}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, "<u>": 2, **{letter: i + 3 for i, letter in enumerate(alphabet)}}
    vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), SHAPES[shape]["vocab_size"])}  # answers have all of them
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    return folder


def prompt(seed: int, tokens: int) -> list[int]:
    """Ids that nobody has seen before, unless with the same seed."""
    import random

    return random.Random(seed).choices(range(3, 250), k=tokens)


def opened_model(shape: str, device: str, **settings: Any) -> Any:
    """A model of that shape with random weights; on a CPU in float32. The settings are those of the engine."""
    from slipstream.config import EngineConfig
    from slipstream.run.engine_model import open_model

    if device == "cpu":
        settings = {"dtype": "float32", **settings}
    with TemporaryDirectory() as folder:
        model = str(model_folder(Path(folder), shape))
        return open_model(EngineConfig(model=model, load_format="dummy", device=device, **settings))


def graph_us(call: Any, layers: list[Any], repeats: int = 10) -> float:
    """Microseconds a layer of `call(layer)` over all layers in one CUDA graph."""
    import torch

    from slipstream.bench.engine import device_ms

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(layers[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for layer in layers:
            call(layer)
    return device_ms(graph.replay, repeats) * 1e3 / len(layers)
