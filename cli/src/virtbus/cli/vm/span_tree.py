"""Draws trace spans as a tree: children below parents, by start time, with bars of duration."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from virtbus.cli import output, units

_BAR_CELLS = 32
_NS_PER_MS = 1_000_000
_SETTLE_NS = 1_000_000_000
_CREATES = frozenset({"vm create", "virtbus create vm"})
"""Names of the span of a create, in the command and in the controller."""


class SpanNode(NamedTuple):
    """A finished span of a trace (`schemas.events.Span`)."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    ok: bool
    message: str

    @property
    def took_ms(self) -> float:
        return (self.end_ns - self.start_ns) / _NS_PER_MS

    def as_map(self) -> dict[str, Any]:
        return {**self._asdict(), "took_ms": round(self.took_ms, 3)}


def spans_of(items: Iterable[Mapping[str, Any]]) -> Iterator[SpanNode]:
    """Yield the spans among `EventItem` maps, each once."""
    seen: set[str] = set()
    for item in items:
        data = item.get("data") or {}
        span_id = str(data.get("span_id") or "")
        if span_id and span_id not in seen:
            seen.add(span_id)
            yield SpanNode(
                trace_id=str(data.get("trace_id") or ""),
                span_id=span_id,
                parent_id=str(data.get("parent_id") or ""),
                name=str(data.get("name") or "?"),
                service=str(data.get("service") or "?"),
                start_ns=int(data.get("start_ns") or 0),
                end_ns=int(data.get("end_ns") or 0),
                ok=bool(data.get("ok", True)),
                message=str(data.get("message") or ""),
            )


def is_creation(spans: Iterable[SpanNode]) -> bool:
    """Return True if these spans of a trace include the create of the VM."""
    return any(span.name in _CREATES for span in spans)


def of_creation(spans: list[SpanNode]) -> list[SpanNode]:
    """Return the spans of a VM's creation among the spans of its trace.

    Later work for the same record has the same trace. The creation ends when the client's wait
    ends, or 1 s after the first start of the domain, whichever is later.
    """
    client = [span.end_ns for span in spans if span.service == "client" and not span.parent_id]
    starts = [span.start_ns for span in spans if span.name.endswith("start domain")]
    if not starts:
        return spans
    # The span of a client that did not wait ends before the domain's start.
    end_ns = max([min(starts) + _SETTLE_NS, *client])
    return [span for span in spans if span.start_ns <= end_ns]


def draw(spans: list[SpanNode]) -> str:
    """Return the tree as text, under a header. A span without a stored parent is a root."""
    known = {span.span_id for span in spans}
    children: dict[str, list[SpanNode]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        parent = (
            span.parent_id if span.parent_id in known and span.parent_id != span.span_id else ""
        )
        children.setdefault(parent, []).append(span)
    start_ns = min(span.start_ns for span in spans)
    end_ns = max(span.end_ns for span in spans)
    ordered = list(_walk(children, "", ""))
    rows = [
        (
            f"{stem}{span.name}",
            span.service,
            f"+{(span.start_ns - start_ns) / _NS_PER_MS:.1f} ms",
            units.span_ms(span.took_ms),
            _bar(span, start_ns, end_ns),
            "" if span.ok else f"failed: {span.message}",
        )
        for stem, span in ordered
    ]
    total = units.span_ms((end_ns - start_ns) / _NS_PER_MS)
    head = f"trace {spans[0].trace_id}  {total}"
    return f"{head}\n{output.table(('STEP', 'SERVICE', 'AT', 'TOOK', 'WHEN', ''), rows)}"


def _walk(
    children: Mapping[str, list[SpanNode]], parent: str, indent: str
) -> Iterator[tuple[str, SpanNode]]:
    siblings = children.get(parent, [])
    for index, span in enumerate(siblings):
        last = index == len(siblings) - 1
        stem = indent + ("└─ " if last else "├─ ") if parent else ""
        yield stem, span
        deeper = indent + ("   " if last else "│  ") if parent else indent
        yield from _walk(children, span.span_id, deeper)


def _bar(span: SpanNode, start_ns: int, end_ns: int) -> str:
    whole = max(1, end_ns - start_ns)
    first = min(_BAR_CELLS - 1, (span.start_ns - start_ns) * _BAR_CELLS // whole)
    cells = max(1, round((span.end_ns - span.start_ns) * _BAR_CELLS / whole))
    return " " * first + "━" * min(cells, _BAR_CELLS - first)
