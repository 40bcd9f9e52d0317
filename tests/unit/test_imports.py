"""Who may import whom.

Read from the source (every import statement, also those inside functions) and from a fresh interpreter (what a module
really drags in).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
HEAVY = ("torch", "transformers")


def modules() -> dict[str, Path]:
    found = {}
    for path in (SOURCE / "slipstream").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports_of(path: Path) -> frozenset[str]:
    """All modules that a file names in import statements, at any depth; names imported from packages included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def within(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


def offences(rooms: tuple[str, ...], forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{name} imports {imported}"
        for name, path in modules().items()
        if within(name, *rooms)
        for imported in sorted(imports_of(path))
        if within(imported, *forbidden) and not within(imported, *allowed)
    ]


def test_the_common_words_know_only_each_other():
    words = ("slipstream.types", "slipstream.wire", "slipstream.errors", "slipstream.config")
    assert offences(words, ("slipstream",), allowed=words) == []


PURE = (
    "slipstream.topo",
    "slipstream.kv",
    "slipstream.transfer.protocol",
    "slipstream.transfer.copies",
    "slipstream.engine.scheduler",
    "slipstream.engine.core",
    "slipstream.router",
)


def test_pure_rooms_name_no_heavy_library():
    assert offences(PURE, HEAVY) == []


def test_the_front_names_no_torch():
    assert offences(("slipstream.front",), ("torch",)) == []


def test_model_and_run_know_of_no_workers_peers_or_http():
    rooms = ("slipstream.model", "slipstream.run")
    others = ("slipstream.front", "slipstream.router", "slipstream.launch", "slipstream.cli", "slipstream.wire")
    assert offences(rooms, (*others, "slipstream.stream", "slipstream.llm", "uvicorn", "starlette")) == []
    assert offences(rooms, ("slipstream.engine",), allowed=("slipstream.engine.plan",)) == []
    assert offences(("slipstream.model",), ("slipstream.transfer",)) == []


def test_the_kernels_know_only_the_numbers_of_a_step_of_the_runner_that_calls_them():
    allowed = ("slipstream.run.cuda.kernels", "slipstream.run.cuda.inputs")
    assert offences(("slipstream.run.cuda.kernels",), ("slipstream.run.cuda", "slipstream.engine"), allowed) == []


def test_lower_rooms_do_not_reach_up_to_the_command_line():
    lower = ("engine", "front", "router", "kv", "transfer", "model", "run", "topo")
    rooms = tuple(f"slipstream.{room}" for room in lower)
    assert offences(rooms, ("slipstream.cli", "slipstream.launch", "slipstream.llm")) == []


IMPORT_AND_WATCH = """
import importlib, sys
*modules, forbidden = sys.argv[1:]
for module in modules:
    importlib.import_module(module)
    for heavy in forbidden.split(","):
        if heavy in sys.modules:
            sys.exit(f"{module} loads {heavy}")
"""


def first_offence(modules: list[str], forbidden: tuple[str, ...]) -> str:
    """Imports all modules into one fresh interpreter; names the first that brings something forbidden in."""
    command = [sys.executable, "-c", IMPORT_AND_WATCH, *modules, ",".join(forbidden)]
    return subprocess.run(command, capture_output=True, text=True).stderr.strip()


def test_the_interpreter_notices_a_heavy_import():
    assert first_offence(["slipstream.types", "numpy", "json"], ("numpy",)) == "numpy loads numpy"


def test_the_commands_load_nothing_heavy_by_themselves():
    commands = [name for name in sorted(modules()) if within(name, "slipstream.cli")]
    assert first_offence(["slipstream", *commands, "slipstream.launch.cluster"], HEAVY) == ""


def test_pure_rooms_load_nothing_heavy():
    assert first_offence([name for name in sorted(modules()) if within(name, *PURE)], HEAVY) == ""


def test_the_router_process_never_loads_torch():
    front = [name for name in sorted(modules()) if within(name, "slipstream.front", "slipstream.router")]
    assert first_offence([*front, "slipstream.launch.router_process"], ("torch",)) == ""
