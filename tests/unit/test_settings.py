"""Settings: where they come from, which source wins, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import settings
from slipstream.config import EngineConfig, FrontConfig, LaunchConfig, RouterConfig, TransferConfig, WorkerConfig
from slipstream.errors import ConfigError
from slipstream.settings import OFFLINE, ROUTER, SERVE, SETTINGS, WORKER, resolve, to_flags

ALL_SCOPES = {"serve": SERVE, "worker": WORKER, "router": ROUTER, "offline": OFFLINE}


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "slipstream.toml"
        path.write_text(text)
        return str(path)

    return write


def refusal(*arguments, **keywords) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(*arguments, **keywords)
    return caught.value.message


def test_defaults_are_those_of_the_structs():
    resolved = resolve(SERVE, {}, environment={})
    assert resolved.config(EngineConfig) == EngineConfig()
    assert resolved.config(FrontConfig) == FrontConfig()
    assert resolved.config(LaunchConfig) == LaunchConfig()


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(toml):
    path = toml("page_tokens = 8\nchunk_tokens = 8\nmax_sequences = 8\n")
    environment = {"SLIPSTREAM_PAGE_TOKENS": "16", "SLIPSTREAM_CHUNK_TOKENS": "16"}
    resolved = resolve(SERVE, {"page_tokens": "32"}, environment=environment, config_file=path)
    engine = resolved.config(EngineConfig)
    assert (engine.page_tokens, engine.chunk_tokens, engine.max_sequences) == (32, 16, 8)


def test_the_file_may_be_named_by_a_variable(toml):
    environment = {"SLIPSTREAM_CONFIG": toml("port = 9000\n")}
    assert resolve(SERVE, {}, environment=environment).config(FrontConfig).port == 9000


def test_a_section_reaches_only_its_own_settings(toml):
    path = toml("[front]\nport = 9000\n[worker]\nport = 7000\n[router]\nprefill = ['http://127.0.0.1:1']\n")
    assert resolve(SERVE, {}, environment={}, config_file=path).config(FrontConfig).port == 9000
    assert resolve(SERVE, {}, environment={}, config_file=path).config(LaunchConfig).prefill == ""
    assert resolve(WORKER, {}, environment={}, config_file=path).config(WorkerConfig).port == 7000
    assert resolve(ROUTER, {}, environment={}, config_file=path).config(RouterConfig).prefill == ("http://127.0.0.1:1",)


def test_values_arrive_in_their_types():
    environment = {
        "SLIPSTREAM_PREFIX_CACHE": "No",
        "SLIPSTREAM_DECODE": "http://a:1, http://b:2",
        "SLIPSTREAM_WORKER_WAIT_S": "2",
    }
    assert resolve(SERVE, {"decode": "1"}, environment=environment).config(EngineConfig).prefix_cache is False
    router = resolve(ROUTER, {"prefill": ("http://c:3",)}, environment=environment).config(RouterConfig)
    assert router.decode == ("http://a:1", "http://b:2")
    assert router.prefill == ("http://c:3",)
    assert isinstance(router.worker_wait_s, float)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"page_tokens": "0"}, ("--page-tokens", "0", "from 1 to 1024")),
        ({"page_tokens": "sixteen"}, ("--page-tokens", "'sixteen'", "whole number")),
        ({"mem_fraction": "1.0"}, ("--mem-fraction", "1.0", "less than 1")),
        ({"drain_s": "nan"}, ("--drain-s", "nan", "number")),
        ({"drain_s": "inf"}, ("--drain-s", "inf", "number")),
        ({"dtype": "int8"}, ("--dtype", "'int8'", "bfloat16")),
        ({"transport": "carrier-pigeon"}, ("--transport", "'carrier-pigeon'", "shm")),
        ({"port": "65536"}, ("--port", "65536", "from 0 to 65535")),
        ({"step_timeout_s": "1e10"}, ("--step-timeout-s", "10000000000.0", "0 or a number from 1 to 86400")),
        ({"step_timeout_s": "1e-9"}, ("--step-timeout-s", "1e-09", "0 or a number from 1 to 86400")),
        ({"worker_silence_s": "1e10"}, ("--worker-silence-s", "10000000000.0", "0 or a number from 2 to 86400")),
        ({"worker_silence_s": "1"}, ("--worker-silence-s", "1.0", "0 or a number from 2 to 86400")),
        ({"worker_silence_s": "-1"}, ("--worker-silence-s", "-1.0", "0 or a number from 2 to 86400")),
    ],
)
def test_a_wrong_flag_is_named_with_its_value_and_what_is_possible(flags, words):
    message = refusal(SERVE, flags, environment={})
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["step_timeout_s", "worker_silence_s"])
@pytest.mark.parametrize("value", ["0", "2", "86400"])
def test_never_and_the_ends_of_the_range_are_possible(name: str, value: str):
    assert SERVE[name].parse(value, name) == float(value)


def test_every_duration_has_an_end_that_a_timer_can_take():
    durations = [setting for setting in SETTINGS if setting.name.endswith("_s")]
    assert len(durations) >= 7
    for setting in durations:
        with pytest.raises(ConfigError, match="is not possible"):
            setting.check(1e10, setting.flag)


def test_a_wrong_variable_is_named():
    message = refusal(SERVE, {}, environment={"SLIPSTREAM_PREFIX_CACHE": "maybe"})
    assert message == "SLIPSTREAM_PREFIX_CACHE: 'maybe' is not possible; it takes true or false."


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("page_token = 8", ("'page_token'", "did you mean page_tokens?")),
        ("[engine]\nport = 1", ("[engine]", "'port'")),
        ("[motor]\nport = 1", ("'motor'",)),
        ("[front]\nport = '8000'", ("[front] port", "'8000'", "whole number")),
        ("page_tokens = 1.5", ("page_tokens", "1.5")),
        ("prefix_cache = 1", ("prefix_cache", "true or false")),
        ("page_tokens = true", ("page_tokens", "True")),
        ("page_tokens", ("not a TOML file",)),
    ],
)
def test_a_wrong_file_is_named_with_its_key(toml, text, words):
    path = toml(text)
    message = refusal(SERVE, {}, environment={}, config_file=path)
    assert path in message
    assert all(word in message for word in words), message


def test_a_missing_file_is_named():
    assert "nowhere.toml" in refusal(SERVE, {}, environment={}, config_file="nowhere.toml")


def test_an_unknown_variable_is_a_warning_with_the_nearest_name():
    resolved = resolve(
        SERVE, {}, environment={"SLIPSTREAM_PAGE_TOKEN": "8", "SLIPSTREAM_JOIN": "http://x", "HOME": "/"}
    )
    assert len(resolved.warnings) == 1
    assert "SLIPSTREAM_PAGE_TOKEN " in resolved.warnings[0]
    assert "did you mean SLIPSTREAM_PAGE_TOKENS?" in resolved.warnings[0]


def test_every_setting_is_described_and_belongs_to_a_command():
    used = {(s.section, s.name) for scope in ALL_SCOPES.values() for s in scope}
    for setting in SETTINGS:
        assert setting.description.rstrip(".") != "", f"{setting.section}.{setting.name} has no description"
        assert setting.description.endswith("."), setting.description
        assert (setting.section, setting.name) in used


def test_every_default_passes_its_own_check():
    for setting in SETTINGS:
        assert setting.check(setting.default, setting.name) == setting.default


def test_only_values_that_differ_become_flags():
    engine = EngineConfig(page_tokens=32, prefix_cache=False, model="m")
    router = RouterConfig(prefill=("http://a:1", "http://b:2"))
    assert to_flags(WORKER, engine, TransferConfig(), skip=("model",)) == ["--page-tokens", "32", "--no-prefix-cache"]
    assert to_flags(ROUTER, router) == ["--prefill", "http://a:1", "--prefill", "http://b:2"]


@given(
    st.builds(
        EngineConfig,
        page_tokens=st.integers(1, 1024),
        mem_fraction=st.floats(0.01, 0.99),
        prefix_cache=st.booleans(),
        dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
        served_model_name=st.text(min_size=1).filter(lambda text: not text.startswith("-")),
    )
)
def test_a_command_line_made_from_a_config_gives_that_config(engine: EngineConfig):
    arguments = to_flags(WORKER, engine)
    flags: dict[str, object] = {}
    while arguments:
        flag = arguments.pop(0)
        if flag == "--no-prefix-cache":
            flags["prefix_cache"] = False
        else:
            flags[flag.removeprefix("--").replace("-", "_")] = arguments.pop(0)
    assert resolve(WORKER, flags, environment={}).config(EngineConfig) == engine


def test_configs_of_a_scope_hold_only_what_the_scope_knows(toml):
    path = toml("[router]\nboth = ['http://x:1']\n")
    assert resolve(SERVE, {}, environment={}, config_file=path).config(RouterConfig) == RouterConfig()


def test_sections_are_the_structs_of_the_config_module():
    from slipstream import config

    structs = {
        value for value in vars(config).values() if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    assert structs - {msgspec.Struct} == set(settings.SECTIONS.values())


def test_workers_may_be_counted_by_a_number_in_the_file(toml):
    given = resolve(SERVE, {}, environment={}, config_file=toml("decode = 2\n[launch]\nprefill = 1\n"))
    assert given.config(LaunchConfig) == LaunchConfig(prefill="1", decode="2")


@pytest.mark.parametrize("line", ["decode = -1", "decode = true", "decode = 1.5", "dtype = 2"])
def test_no_other_number_stands_for_a_text(toml, line):
    with pytest.raises(ConfigError, match="is not possible"):
        resolve(SERVE, {}, environment={}, config_file=toml(line + "\n"))


def test_only_a_name_that_is_close_is_suggested(toml):
    known = refusal(SERVE, {}, environment={}, config_file=toml("page_token = 1\n"))
    assert known.endswith("'page_token'; did you mean page_tokens?")
    assert refusal(SERVE, {}, environment={}, config_file=toml("flavour = 1\n")).endswith("'flavour'.")
    assert "did you mean" not in resolve(SERVE, {}, environment={"SLIPSTREAM_FLAVOUR": "1"}).warnings[0]
