"""Documents that are made from code, or speak of it, say what the code does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from slipstream import settings
from slipstream.types import SamplingParams

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_configuration_reference_is_what_the_structs_say():
    written = (ROOT / "docs/configuration.md").read_text()
    assert written == settings.reference(), "run: python -m slipstream.settings > docs/configuration.md"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert missing == []


def test_every_document_stands_in_the_readme_s_table():
    table = (ROOT / "README.md").read_text().partition("## Documents")[2]
    linked = set(re.findall(r"^\| \[[^]]+\]\(([^)#]+)\)", table, re.M))
    documents = {str(path.relative_to(ROOT)) for path in DOCUMENTS} - {"README.md", "CHANGELOG.md"}
    assert linked == documents


def test_every_folder_of_tests_is_named_to_contributors():
    named = set(re.findall(r"^\| `tests/(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M))
    folders = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/test_*.py")}
    assert named == folders


def test_every_page_that_is_made_from_code_is_written_by_make_docs():
    recipe = (ROOT / "Makefile").read_text().partition("\ndocs:")[2].partition("\n\n")[0]
    said = next(line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("make docs"))
    pages = [str(path.relative_to(ROOT)) for path in DOCUMENTS if "<!-- Made from " in path.read_text()]
    assert pages
    for page in pages:
        assert f"> {page}" in recipe
        assert page in said


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_flags_in_slipstream_commands_of_documents_exist(document: Path):
    known = {setting.flag for setting in settings.SETTINGS} | {"--help", "--version", "--config"}
    known |= {"--no-" + setting.flag[2:] for setting in settings.SETTINGS if setting.is_switch}
    known |= generate_flags()
    unknown = {
        flag
        for line in document.read_text().splitlines()
        if re.search(r"slipstream (serve|worker|router|generate)\b", line)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)
    } - known
    assert unknown == set()


def test_the_table_of_sampling_parameters_has_every_field_with_its_default():
    table = re.findall(r"^\| (`.*?) \| (.*?) \| ", (ROOT / "docs/getting-started.md").read_text(), re.M)
    shown = {}
    for names, defaults in table:
        for name, default in zip(names.split(", "), defaults.split(", "), strict=True):
            shown[name.strip("`")] = ast.literal_eval(default.strip("`"))
    assert shown == {name: getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__}


def generate_flags() -> set[str]:
    from slipstream.cli.generate import command

    return {flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")}


def test_every_path_that_the_architecture_page_names_exists():
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?|[a-z_]+\.py)`", text)
    assert named, "the page names no files"
    missing = [path for path in named if not any((root / path).exists() for root in (ROOT, ROOT / "src/slipstream"))]
    assert missing == []
