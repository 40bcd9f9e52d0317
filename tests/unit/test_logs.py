"""Log lines: one line an event, readable by people or by programs."""

from __future__ import annotations

import io
import logging
import re

import msgspec
import pytest

from slipstream import logs


@pytest.fixture(autouse=True)
def _restore_logging():
    root, ours = logging.getLogger(), logging.getLogger("slipstream")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    logging.captureWarnings(False)


def written(log_format, level="info", process="p") -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    logs.set_up(level, log_format, process, stream)
    return logging.getLogger("slipstream.router.fleet"), stream


def test_text_lines_have_time_level_logger_and_message():
    logger, stream = written("text")
    logger.info("linked %s", "w-1")
    logger.warning("lost")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} router\.fleet: linked w-1", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} warning router\.fleet: lost", second)


def test_an_exception_in_text_is_indented_under_its_line():
    logger, stream = written("text")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("error router.fleet: failed")
    assert rest
    assert all(line.startswith("    ") for line in rest)


def test_json_lines_are_one_object_each_with_the_extra_fields():
    logger, stream = written("json", process="decode-0")
    logger.info("two\nlines", extra={"seconds": 1.5, "odd": {1, 2}.__class__})
    (line,) = stream.getvalue().splitlines()
    event = msgspec.json.decode(line)
    assert event["process"] == "decode-0"
    assert event["level"] == "info"
    assert event["message"] == "two\nlines"
    assert event["seconds"] == 1.5
    assert event["logger"] == "slipstream.router.fleet"


def test_libraries_speak_up_from_warning_on():
    logger, stream = written("text", level="info")
    logger.info("ours")
    chatty = logging.getLogger("somebody.else")
    chatty.setLevel(logging.INFO)
    chatty.info("theirs")
    chatty.warning("their warning")
    chatty.setLevel(logging.NOTSET)
    text = stream.getvalue()
    assert "ours" in text
    assert "theirs" not in text
    assert "their warning" in text


def test_setting_up_again_replaces_the_first():
    logger, first = written("text")
    _, second = written("text", level="error")
    logger.info("quiet")
    logger.error("loud")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1


def test_a_flood_of_one_message_is_bounded_and_its_gaps_are_counted(monkeypatch):
    logger, stream = written("text")
    second = [1000.0]
    monkeypatch.setattr("time.time_ns", lambda: int(second[0] * 1e9))
    monkeypatch.setattr("time.time", lambda: second[0])
    for number in range(100):
        logger.warning("%s failed", f"request-{number}")
    logger.warning("something else")
    second[0] += 1
    logger.warning("%s failed", "request-100")
    lines = stream.getvalue().splitlines()
    assert len(lines) == logs.LINES_A_SECOND + 2
    assert "something else" in lines[-2]
    assert lines[-1].endswith(f"request-100 failed ({100 - logs.LINES_A_SECOND} like this were left out)")


def test_at_level_debug_nothing_is_left_out():
    logger, stream = written("text", level="debug")
    for number in range(100):
        logger.warning("%s failed", f"request-{number}")
    assert stream.getvalue().count("\n") == 100
