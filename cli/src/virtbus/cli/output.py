"""Formats and prints output: tables for people, JSON and YAML for programs."""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

_COLOURS = {
    "Running": "32",
    "Ready": "32",
    "ready": "32",
    "ok": "32",
    "Failed": "31",
    "fail": "31",
    "Unknown": "33",
    "missing": "31",
    "silent": "33",
    "warn": "33",
    "Deleting": "33",
    "Stopping": "33",
    "recovering": "33",
    "suspect": "33",
    "down": "31",
    "left": "33",
}


def safe(value: object) -> str:
    """Return `value` as one line. Control characters are escaped, because guests choose values."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def wants_colour(stream: TextIO) -> bool:
    """Return True on a terminal. NO_COLOR (no-color.org) or TERM=dumb forbids colours."""
    return redraws(stream) and not os.environ.get("NO_COLOR")


def redraws(stream: TextIO) -> bool:
    """Return True on a terminal that understands control sequences."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, code: str, stream: TextIO) -> str:
    """Return `text` in the ANSI colour `code`, if the stream wants colours."""
    return f"\x1b[{code}m{text}\x1b[0m" if code and wants_colour(stream) else text


def paint_state(word: str, stream: TextIO) -> str:
    """Return a state in its colour. Green is good, yellow is temporary, red needs a person."""
    return paint(word, _COLOURS.get(word.strip(), ""), stream)


def as_json(value: Any, *, indent: int | None = 2) -> str:
    """Return JSON, indented or (with None) on one line."""
    return json.dumps(value, indent=indent, ensure_ascii=False, default=str)


def as_yaml(value: Any) -> str:
    """Return YAML with the keys in their order."""
    import yaml  # takes 20 ms; only -o yaml needs it

    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return text


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], stream: TextIO | None = None
) -> str:
    """Return aligned columns with coloured states."""
    out = stream or sys.stdout
    cells = [[safe(cell) for cell in row] for row in rows]
    widths = [len(title) for title in header]
    for row in cells:
        widths = [max(w, len(cell)) for w, cell in zip(widths, row, strict=True)]
    lines = ["  ".join(t.ljust(w) for t, w in zip(header, widths, strict=True)).rstrip()]
    for row in cells:
        padded = [cell.ljust(w) for cell, w in zip(row, widths, strict=True)]
        painted = [paint_state(cell, out) for cell in padded[:-1]]
        lines.append("  ".join([*painted, paint_state(padded[-1].rstrip(), out)]).rstrip())
    return "\n".join(lines)


def fields(pairs: Iterable[tuple[str, object]]) -> str:
    """Return aligned `name: value` lines, without empty values."""
    shown = [(name, safe(value)) for name, value in pairs if value not in {None, ""}]
    width = max((len(name) for name, _ in shown), default=0) + 1
    return "\n".join(f"{name + ':':<{width}}  {value}" for name, value in shown)


def render(value: Any, style: str) -> str:
    """Return `value` in the style `json` or `yaml`."""
    return as_json(value) if style == "json" else as_yaml(value).rstrip("\n")


def document(value: Any, style: str) -> str:
    """Return one value of a sequence: JSON on one line, or a YAML document after `---`."""
    return as_json(value, indent=None) if style == "json" else f"---\n{as_yaml(value)}".rstrip()


def write(text: str, stream: TextIO | None = None) -> None:
    """Print `text` and a line end."""
    out = stream or sys.stdout
    out.write(f"{text}\n")


def flush(stream: TextIO | None = None) -> None:
    """Flush the stream, so that a program can read output that still grows."""
    (stream or sys.stdout).flush()


def picked(view: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the named fields that a map has."""
    return {name: view[name] for name in names if name in view}
