"""Commands in documents exist, and every decision has the same five parts."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from virtbus.cli.commands import virtbus

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ADRS = sorted((ROOT / "docs" / "adr").glob("*.md"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(page: Path) -> Iterator[str]:
    """Yield the lines of a page's `sh` blocks, with continued lines joined."""
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield from (part.strip() for part in re.split(r"&&|;|\|", line.split(" #")[0]))


def said(program: str) -> list[str]:
    found = {line for page in PAGES for line in commands(page)}
    return sorted(line for line in found if re.match(rf"(sudo )?{program}(\s|$)", line))


def verb(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that `virtbus <words>` runs, and the remaining words."""
    command: click.Command = virtbus
    while isinstance(command, click.Group):
        while words and words[0].startswith("-"):
            words = words[2:]  # the root's own options take a value
        if not words:
            return command, []
        inner = command.get_command(click.Context(command), words[0])
        assert inner is not None, f"{command.name} has no verb {words[0]}"
        command, words = inner, words[1:]
    return command, words


@pytest.mark.parametrize("line", said("virtbus"))
def test_a_line_of_virtbus_names_a_verb_and_its_options(line: str) -> None:
    command, rest = verb(shlex.split(line)[1:])
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    given = {word.split("=")[0] for word in rest if word.startswith("-") and len(word) > 1}
    assert given - known - {"--help", "-h", "--"} == set()


@pytest.mark.parametrize("line", said("make"))
def test_a_line_of_make_names_a_target(line: str) -> None:
    assert {word for word in line.split()[1:] if "=" not in word} <= TARGETS


def test_the_readme_shows_the_first_commands() -> None:
    lines = list(commands(ROOT / "README.md"))
    assert any(line.startswith("make demo") for line in lines)
    assert any(line.startswith("virtbus vm create") for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_within_the_tree_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    inside = [
        target for target in targets if "://" not in target and not target.startswith("mailto")
    ]
    assert [target for target in inside if not (page.parent / target).exists()] == []


# --- decisions -------------------------------------------------------------------------------
STATUSES = {"proposed", "accepted", "superseded", "deprecated"}


def test_decisions_are_numbered_once() -> None:
    numbers = [path.name[:4] for path in ADRS]
    assert all(re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", path.name) for path in ADRS)
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("path", ADRS, ids=name)
def test_a_decision_has_its_five_parts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert re.fullmatch(rf"# {path.name[:4]}\. \S.*", lines[0])
    status = re.search(r"^Status: (\w+)", text, re.MULTILINE)
    assert status is not None
    assert status[1].lower() in STATUSES
    assert re.search(r"^Date: \d{4}-\d{2}-\d{2}$", text, re.MULTILINE)
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    written = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in sections}
    for section in ("Context", "Decision", "Consequences"):
        assert written.get(section), f"no {section}"


def test_a_decision_that_is_cited_exists() -> None:
    folders = ("*", "services/*", "tools/*")
    sources = [path for folder in folders for path in ROOT.glob(f"{folder}/src/**/*.py")]
    sources += PAGES
    cited = {
        number for path in sources for number in re.findall(r"\bADR (0\d{3})\b", path.read_text())
    }
    assert cited - {path.name[:4] for path in ADRS} == set()
