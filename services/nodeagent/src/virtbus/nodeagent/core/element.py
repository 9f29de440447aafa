"""Builds XML from elements, so that a value can only become text or an attribute (INJ-01)."""

import re
from collections.abc import Callable
from xml.etree import ElementTree as ET

Element = ET.Element

_MARKUP = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}
_QUOTED = {**_MARKUP, ord('"'): "&quot;", **{ord(one): f"&#{ord(one):02};" for one in "\r\n\t"}}
"""The escapes of attributes. A parser turns unescaped tabs and line ends in attributes into blanks.
"""
_needs_escape = re.compile('[&<>"\r\n\t]').search


def el(tag: str, *children: "Element | str | None", **attributes: "str | int | None") -> Element:
    """Return `<tag attributes>children</tag>`.

    A child or attribute that is None is omitted. `_` in an attribute's name becomes `-`, and a
    final `_` is dropped.
    """
    element = ET.Element(
        tag,
        {
            k.rstrip("_").replace("_", "-") if "_" in k else k: str(v)
            for k, v in attributes.items()
            if v is not None
        },
    )
    for child in children:
        if isinstance(child, str):
            element.text = child
        elif child is not None:
            element.append(child)
    return element


def to_text(element: Element) -> str:
    """Return an element as text, without white space between tags.

    A name in a namespace needs a prefix, and the caller must declare the prefix. This writer takes
    half the time of ElementTree's, and libvirt parses less.
    """
    parts: list[str] = []
    _write(element, parts.append)
    return "".join(parts)


def _write(element: Element, write: Callable[[str], None]) -> None:
    tag, text = element.tag, element.text
    found = "".join(
        [
            f' {name}="{value.translate(_QUOTED) if _needs_escape(value) else value}"'
            for name, value in element.items()
        ]
    )
    if not (text or len(element)):
        write(f"<{tag}{found} />")
        return
    write(f"<{tag}{found}>{text.translate(_MARKUP) if text else ''}")
    for child in element:
        _write(child, write)
    write(f"</{tag}>")
