"""Reads the prose of the tree and reports what breaks the rules of plain technical English.

Prose is every docstring, comment and log message, every CRD description (`said`, `must`), and every
Markdown page. Code is not prose.
`python -m tests.contract.prose` prints all findings; with `--write` it rewrites the allow-list.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("prose-allowed.txt")
MAX_WORDS = 40
SOURCES = ("schemas", "bus", "cli", "services", "simulator", "tools/documents", "tests", "images")
PAGES = ("*.md", "docs/**/*.md", "images/**/*.md")
TABLES = "docs/reference/*.md"
_DESCRIBES = frozenset({"said", "must"})
"""Functions of kubebridge's models. `kubectl explain` shows their first argument."""
_LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})

_HEADLINE = re.compile(r"\W*(What|Who|Whose|Whom|Whether|How|Where|When|Which|Why)\b")
_ID = re.compile(
    r"\b(?:[IF]\d{1,2}|(?:MSG|BUS|IMG|INJ|SEC|NET|CON|FDS|SRC|K8S|RES)-\d{2})\b(?![:-]\d)"
)
_DEFINED = re.compile(r"^\| `?([A-Z0-9]+(?:-\d+)?)`? \|", re.MULTILINE)
_OUTSIDE = re.compile(
    r"(?<!RFC )(?<!RFC \d{4} )§|\bresearch/|(?<![\w-])(?:bus|aesthetics|reliability|"
    r"perf-limits|fast-start|instant-start|feasibility|k8s-feasibility|peers|virtlet|kubevirt|"
    r"storage|red-team|migration|design)\.md\b|\b(?:perf-limits|fast-start) "
)
_ARCHAIC = re.compile(
    r"\b(anew|shall|told|lets? go|letting go|whoever|whatever|whosoever|wherever|"
    r"perhaps|hence|thereof|thereby|wherein|whereby|herein|deeds?|befalls?|beside|"
    r"made good|makes it good|is so|are so|be so|be it|it be|so be|ere|lest|upon|"
    r"at rest|stands? still|goes? on|go on|went on)\b"
    r"|[,;:] else\b|\bor else\b"
    r"|[,;:] for (?:it|they|this|that|there|these|those|nobody|nothing|we|he|who|what|of)\b",
    re.IGNORECASE,
)
_HEADLESS = re.compile(r"(What|Who|Whom|Whose|Whether) [a-z`]")
_NEXT = {
    "headline": "say what it is or does: subject, verb, object",
    "citation": "add the id to a table in docs/reference/, or drop the citation",
    "outside": "say it here, or cite a page of this repository",
    "long": f"split it: a sentence has at most {MAX_WORDS} words",
    "archaic": "use the plain word (because, otherwise, again, report, release, continue)",
    "headless": "name the thing: no sentence opens with a headless relative clause",
}


@dataclass(frozen=True)
class Text:
    """A piece of prose and the line at which it begins."""

    line: int
    text: str
    docstring: bool = False
    """True for a CRD description, too: both open with the words that say what the thing is."""


@dataclass(frozen=True)
class Finding:
    """A place that breaks a rule."""

    path: str
    line: int
    rule: str
    excerpt: str

    def __str__(self) -> str:
        """One line for a person: place, rule, words, next step."""
        return f"{self.path}:{self.line}: {self.rule}: {self.excerpt!r}: {_NEXT[self.rule]}"


# --- reading -----------------------------------------------------------------------------------
def _string(node: ast.AST | None) -> ast.Constant | None:
    value = node.value if isinstance(node, ast.Expr) else node
    found = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return value if found and isinstance(value, ast.Constant) else None


def _logged(node: ast.Call) -> ast.Constant | None:
    is_log = isinstance(node.func, ast.Attribute) and node.func.attr in _LOG_METHODS
    return _string(node.args[0]) if is_log and node.args else None


def _described(node: ast.Call) -> ast.Constant | None:
    is_field = isinstance(node.func, ast.Name) and node.func.id in _DESCRIBES
    return _string(node.args[0]) if is_field and node.args else None


def _comments(lines: list[str], strings: set[int]) -> Iterator[Text]:
    """Yield each comment; consecutive whole-line comments are one."""
    start, words = 0, list[str]()
    for number, line in enumerate([*lines, ""], 1):
        found = None
        if "#" in line and number not in strings:
            found = re.match(r"""((?:[^'"#]|'[^']*'|"[^"]*")*)#[: ]?(.*)""", line)
        alone = found is not None and not found[1].strip()
        if words and not alone:
            yield Text(start, " ".join(words))
            words = []
        if found and alone:
            start = start if words else number
            words.append(found[2])
        elif found and not found[2].startswith(("noqa", "type:")):
            yield Text(number, found[2])


def python_prose(source: str) -> Iterator[Text]:
    """Yield the docstrings, comments, log messages and CRD descriptions of a module."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and (text := _string(node)):
            yield Text(node.lineno, str(text.value), docstring=True)
        elif isinstance(node, ast.Call) and (text := _logged(node)):
            yield Text(text.lineno, str(text.value))
        elif isinstance(node, ast.Call) and (text := _described(node)):
            yield Text(text.lineno, str(text.value), docstring=True)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.end_lineno:
            strings.update(range(node.lineno, node.end_lineno + (node.end_lineno > node.lineno)))
    yield from _comments(source.splitlines(), strings)


def page_prose(source: str) -> Iterator[Text]:
    """Yield the paragraphs, list items and table cells of a Markdown page, without code."""
    start, words, fenced = 0, list[str](), False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        text = line.strip()
        fence = text.startswith("```")
        fenced ^= fence
        ends = fence or fenced or not text or text[0] in "|#" or re.match(r"([-*>]|\d+\.) ", text)
        if words and ends:
            yield Text(start, " ".join(words))
            words = []
        if fence or fenced or not text:
            continue
        if text[0] == "|":
            yield from (Text(number, cell) for cell in text.split("|"))
            continue
        start = start if words else number
        words.append(text)


# --- verdict -----------------------------------------------------------------------------------
def sentences(text: str) -> list[str]:
    """Split prose at full stops, and at blank lines; code spans count as one word."""
    plain = re.sub(r"`[^`]*`|\(https?://[^)]*\)", "X", text)
    return re.split(
        r"(?<=[.?!])[\s)*]+(?=[A-Z\"(*])|\n\s*\n|\n\s*(?:[-*]|\w+:) |\n(?=\S+ {2,})", plain
    )


def _judge_sentences(text: Text) -> Iterator[tuple[str, str]]:
    for number, sentence in enumerate(sentences(text.text)):
        if len(sentence.split()) > MAX_WORDS:
            yield "long", sentence.strip()[:60]
        opens = _HEADLESS.match(sentence.strip()) and not sentence.strip().endswith("?")
        if opens and not (text.docstring and number == 0):
            yield "headless", sentence.strip()[:60]


def judge(text: Text, defined: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the rule and the words of each fault of a piece of prose."""
    bare = re.sub(r"`[^`]*`", "X", text.text)
    if text.docstring and _HEADLINE.match(text.text):
        yield "headline", text.text.strip()[:60]
    for cited in _ID.findall(bare):
        if cited not in defined:
            yield "citation", cited
    for found in _OUTSIDE.finditer(text.text):
        yield "outside", text.text[max(0, found.start() - 10) : found.end() + 20]
    for found in _ARCHAIC.finditer(bare):
        yield "archaic", bare[max(0, found.start() - 20) : found.end() + 20]
    yield from _judge_sentences(text)


def findings() -> list[Finding]:
    """Judge the whole tree."""
    defined = frozenset(
        cited for page in ROOT.glob(TABLES) for cited in _DEFINED.findall(page.read_text())
    )
    modules = {path: python_prose for top in SOURCES for path in (ROOT / top).rglob("*.py")}
    pages = {path: page_prose for pattern in PAGES for path in ROOT.glob(pattern)}
    return [
        Finding(path.relative_to(ROOT).as_posix(), text.line, rule, " ".join(excerpt.split()))
        for path, read in sorted((modules | pages).items())
        for text in read(path.read_text(encoding="utf-8"))
        for rule, excerpt in judge(text, defined)
    ]


def counted(found: list[Finding]) -> Counter[tuple[str, str]]:
    """Count the findings of each file and rule."""
    return Counter((one.path, one.rule) for one in found)


def allowed() -> Counter[tuple[str, str]]:
    """Read the allow-list: one `path rule count` a line."""
    lines = [line.split() for line in ALLOWED.read_text(encoding="utf-8").splitlines()]
    return Counter({(path, rule): int(count) for path, rule, count in lines})


def main() -> None:
    """Print the findings; `--write` removes from the allow-list what is no longer found."""
    found = findings()
    if "--write" in sys.argv:
        kept = counted(found) & allowed()
        lines = [f"{path} {rule} {count}\n" for (path, rule), count in kept.items()]
        ALLOWED.write_text("".join(sorted(lines)), encoding="utf-8")
        return
    sys.stdout.writelines(f"{one}\n" for one in found)


if __name__ == "__main__":
    main()
