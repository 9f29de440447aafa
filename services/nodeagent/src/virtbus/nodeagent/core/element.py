"""Builds XML from elements: a value can only become text or an attribute (INJ-01)."""

from xml.etree import ElementTree as ET

Element = ET.Element


def el(tag: str, *children: "Element | str | None", **attributes: "str | int | None") -> Element:
    """Return `<tag attributes>children</tag>`.

    None is omitted. `_` in an attribute's name becomes `-`, and a final `_` is dropped.
    """
    element = ET.Element(
        tag,
        {k.rstrip("_").replace("_", "-"): str(v) for k, v in attributes.items() if v is not None},
    )
    for child in children:
        if isinstance(child, str):
            element.text = child
        elif child is not None:
            element.append(child)
    return element


def to_text(element: Element) -> str:
    """Return an element as text, without white space between tags, which libvirt would parse."""
    return ET.tostring(element, encoding="unicode")
