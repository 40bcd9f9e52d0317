"""Every setting, with its default, its bounds and its one sentence.

A setting comes from, in order of precedence: a command-line flag (`--page-tokens 32`), an environment variable
(`SLIPSTREAM_PAGE_TOKENS=32`), a TOML file given by `--config` or `SLIPSTREAM_CONFIG` (`page_tokens = 32`, flat or under
the section's name), the default here. Flags and variables are made from the field names, and so is
`docs/configuration.md`; a field without a description does not pass the tests.

Configs are frozen; whoever needs a variation makes a new one with `msgspec.structs.replace`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVDtype = Literal["auto", "fp8"]
AttentionBackend = Literal["auto", "torch", "triton", "flashinfer"]
Transport = Literal["auto", "local", "shm", "tcp", "cuda_ipc", "nixl", "mooncake", "fake"]
LogFormat = Literal["text", "json"]
DAY_S = 86_400
WEEK_S = 7 * DAY_S  # the longest time that any setting takes: timers of the system know no end, but they have one


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's engine: model, memory, batching."""

    model: Annotated[
        str, Meta(description="Model: `smollm2`, a folder with config.json and safetensors, a .gguf file, or a hub id.")
    ] = "smollm2"
    served_model_name: Annotated[
        str, Meta(description="Name that clients use; empty means the last part of MODEL.")
    ] = ""
    tokenizer: Annotated[
        str, Meta(description="Folder, file or hub id of the tokenizer; empty means that of the model.")
    ] = ""
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(description="`dummy` fills the weights at random from the config, for benchmarks."),
    ] = "auto"
    dtype: Annotated[
        Dtype,
        Meta(description="Weights and KV: `auto` is bfloat16 on GPUs and on CPUs with AMX, else float32."),
    ] = "auto"
    kv_dtype: Annotated[
        KVDtype,
        Meta(
            description="Keys and values in the pool: `auto` as --dtype; `fp8` half of bfloat16's size, with an error "
            "of up to 1/16 of each number. Workers that exchange KV must agree."
        ),
    ] = "auto"
    attention_backend: Annotated[
        AttentionBackend,
        Meta(
            description="Attention on GPUs: `auto` takes the fastest that works here (`torch` on CPUs); a name is "
            "obeyed or refused."
        ),
    ] = "auto"
    device: Annotated[
        str,
        Meta(description="`auto`, `cpu`, `cuda`, `cuda:N` or a GPU's UUID; with --tp a list, as `cuda:0,cuda:1`."),
    ] = "auto"
    tp: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Tensor-parallel ranks of a worker: processes that share the model, one GPU each.",
        ),
    ] = 1
    threads: Annotated[
        int,
        Meta(
            ge=0, description="Compute threads of a CPU worker; 0 shares the cores among the workers of this machine."
        ),
    ] = 0
    page_tokens: Annotated[int, Meta(ge=1, le=1024, description="Tokens of one KV page.")] = 16
    kv_tokens: Annotated[
        int, Meta(ge=0, description="Size of the KV pool in tokens; 0 derives it from free memory.")
    ] = 0
    mem_fraction: Annotated[
        float,
        Meta(
            gt=0.0,
            lt=1.0,
            description="Share of a GPU's memory that weights and KV pool may fill; workers of one `serve` that share "
            "a GPU divide it.",
        ),
    ] = 0.88
    max_model_len: Annotated[
        int, Meta(ge=0, description="Longest prompt plus answer in tokens; 0 is what model and pool allow.")
    ] = 0
    max_sequences: Annotated[int, Meta(ge=1, description="Sequences that decode together at most.")] = 64
    chunk_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Tokens computed in one step at most; longer prompts are cut into chunks. 0 is 512 on a CPU "
            "and 8192 on a GPU.",
        ),
    ] = 0
    mixed_chunk_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="The same for a step in which other sequences decode: what they wait for between two tokens. 0 "
            "is 32 on a CPU; on a GPU it is measured at start, 128 to 512: the least that computes "
            "prompts at 70 % of the rate of 512.",
        ),
    ] = 0
    prompt_graphs: Annotated[
        bool,
        Meta(
            description="Steps of up to 2048 tokens that hold pieces of prompts run as CUDA graphs with attention "
            "between them: a third of the host's work or less. They are captured at start. No effect on a CPU."
        ),
    ] = True
    step_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=DAY_S,
            extra={"or_zero": True},
            description="A step that has not ended after this time, and ten times what its tokens take here beside it, "
            "hangs: the worker says where, and ends. So does one whose threads or ranks do not answer. 0 is never.",
        ),
    ] = 120.0
    prefix_cache: Annotated[bool, Meta(description="Keep finished prefixes for reuse until the room is needed.")] = True
    max_waiting: Annotated[
        int, Meta(ge=1, description="Requests that may wait at one worker; more are refused with 429.")
    ] = 1024


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How KV travels between workers."""

    transport: Annotated[
        Transport,
        Meta(description="`auto` takes the fastest that passes its preflight; a name is obeyed or refused."),
    ] = "auto"
    tcp_streams: Annotated[int, Meta(ge=1, le=64, description="Parallel streams a peer of the tcp transport.")] = 4
    tcp_port: Annotated[int, Meta(ge=0, le=65535, description="Port of the tcp transport; 0 takes a free one.")] = 0
    rdma_nics: Annotated[
        str,
        Meta(description="RDMA devices for nixl and mooncake, as `mlx5_0,mlx5_1`; empty lets them choose."),
    ] = ""
    preflight_bytes: Annotated[
        int, Meta(ge=4096, description="Size of the area that a route's preflight writes, verifies and times.")
    ] = 4 << 20
    cuda_programs: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Thread blocks of the kernel that copies pages between GPUs; more fill the link, fewer leave "
            "more of the GPU to the model.",
        ),
    ] = 64
    cuda_engine_preference: Annotated[
        float,
        Meta(
            gt=0,
            description="How many times longer than by its kernel cuda_ipc may take by the copy engine, which leaves "
            "the GPU to the model; more than 1 sends shorter pages that way.",
        ),
    ] = 1.0
    fake_seed: Annotated[int, Meta(description="Seed of the fake transport's trouble.")] = 0
    fake_trouble: Annotated[
        float, Meta(ge=0.0, le=1.0, description="Share of copies that the fake transport delays, reorders or loses.")
    ] = 0.1


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as a process: where it listens and whom it joins."""

    role: Annotated[Literal["prefill", "decode", "both"], Meta(description="What routers may send to this worker.")] = (
        "both"
    )
    name: Annotated[str, Meta(description="Name in logs, metrics and tables; empty makes one from role and port.")] = ""
    host: Annotated[str, Meta(description="Address to listen on, for HTTP, messages and tcp transfers.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="HTTP port; 0 takes a free one.")] = 0
    wire_port: Annotated[int, Meta(ge=0, le=65535, description="Port for messages; 0 takes a free one.")] = 0
    join: Annotated[str, Meta(description="URL of a router to register with; repeated until it answers.")] = ""
    api_key: Annotated[str, Meta(description="Bearer token of the router to join, where it asks for one.")] = ""
    heartbeat_s: Annotated[
        float, Meta(ge=0.01, le=DAY_S, description="Interval of Status and of heartbeats between machines.")
    ] = 1.0


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Placement, and a request's life."""

    prefill: Annotated[tuple[str, ...], Meta(description="URLs of prefill workers.")] = ()
    decode: Annotated[tuple[str, ...], Meta(description="URLs of decode workers.")] = ()
    both: Annotated[tuple[str, ...], Meta(description="URLs of workers for both roles.")] = ()
    max_queue: Annotated[
        int, Meta(ge=1, description="Requests under way at most; more are refused with 429 and Retry-After.")
    ] = 4096
    worker_wait_s: Annotated[
        float,
        Meta(ge=0, le=WEEK_S, description="How long a request waits for a worker to come (back) before it gets 503."),
    ] = 3.0
    worker_silence_s: Annotated[
        float,
        Meta(
            ge=2,
            le=DAY_S,
            extra={"or_zero": True},
            description="A linked worker that answers nothing for so long is given up: its requests continue "
            "elsewhere, and `serve` kills it after as long again. 0 is never.",
        ),
    ] = 30.0
    resubmissions: Annotated[
        int, Meta(ge=0, description="How often a request whose worker was lost is continued elsewhere.")
    ] = 1
    strict_roles: Annotated[
        bool,
        Meta(
            description="Never use a worker for the other role: neither when none of the wanted role is left, nor a "
            "decode worker for prompts that would wait long."
        ),
    ] = False
    request_timeout_s: Annotated[
        float, Meta(gt=0, le=WEEK_S, description="A request that takes longer ends with 504.")
    ] = 600.0


class FrontConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP surface."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[str, Meta(description="Bearer token that clients must send; empty asks for none.")] = ""
    max_body_bytes: Annotated[int, Meta(ge=1024, description="Longest request body.")] = 32 << 20
    default_max_tokens: Annotated[
        int, Meta(ge=0, description="max_tokens of a chat request that names none; 0 is what the context allows.")
    ] = 0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe log line to print.")
    ] = "info"
    log_format: Annotated[LogFormat, Meta(description="Log lines for people (`text`) or programs (`json`).")] = "text"


class ObserveConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a process shows of itself, beside its log."""

    metrics_compat: Annotated[
        Literal["none", "vllm", "sglang"],
        Meta(description="Also show metrics under the names that boards and endpoint pickers for these engines read."),
    ] = "none"
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="Send OpenTelemetry traces there, as `http://host:4318`; empty means what the variables "
            "`OTEL_EXPORTER_OTLP_*` say, and none without them."
        ),
    ] = ""


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A whole cluster on this machine: which workers on which devices, and how it starts, heals and ends."""

    prefill: Annotated[
        str,
        Meta(
            description="Prefill workers of `serve`: a count (`2`) or devices (`cpu`, `2xcpu`, `cuda:0,1`, "
            "`tp2@cuda:2,3`)."
        ),
    ] = ""
    decode: Annotated[str, Meta(description="Decode workers of `serve`, written like --prefill.")] = ""
    both: Annotated[str, Meta(description="Workers of `serve` for both roles, written like --prefill.")] = ""
    drain_s: Annotated[
        float,
        Meta(ge=0, le=WEEK_S, description="How long requests under way may take to finish after Ctrl-C or SIGTERM."),
    ] = 30.0
    start_timeout_s: Annotated[
        float,
        Meta(ge=1, le=WEEK_S, description="`serve` gives up when no request can be served after this time."),
    ] = 900.0
    max_failures: Annotated[
        int,
        Meta(
            ge=1,
            description="`serve` gives up when a process that has never served ends this often in a row soon after "
            "its start.",
        ),
    ] = 5
