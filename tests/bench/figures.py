"""A figure: a measurement, its bound, and the verdict."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `value` and `bound` share `unit`; without a bound: no verdict."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    samples: int = 1
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool | None:
        return None if self.bound is None else self.value <= self.bound


def median_of(name: str, values: Sequence[float], unit: str, **more: object) -> Figure:
    """The median of repeated runs, with the quartiles as its spread."""
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return Figure(
        name,
        round(statistics.median(values), 3),
        unit,
        samples=len(values),
        low=round(quarters[0], 3),
        high=round(quarters[2], 3),
        **more,  # type: ignore[arg-type]
    )


def ratio_of(
    name: str, ours: Sequence[float], raw: Sequence[float], bound: float, note: str = ""
) -> Figure:
    """Median over median of interleaved runs: both see the same state of the machine."""
    pairs = sorted(a / b for a, b in zip(ours, raw, strict=True))
    quarters = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else [pairs[0]] * 3
    value = statistics.median(ours) / statistics.median(raw)
    spread = (
        f"{statistics.median(ours) * 1000:.0f} ms against {statistics.median(raw) * 1000:.0f} ms"
    )
    return Figure(
        name,
        round(value, 3),
        "x raw",
        bound,
        len(ours),
        round(quarters[0], 3),
        round(quarters[2], 3),
        f"{spread}; {note}" if note else spread,
    )


def as_json(figure: Figure) -> str:
    """Return one line of JSON."""
    return json.dumps({**asdict(figure), "holds": figure.holds})


def as_table(figures: Sequence[Figure]) -> str:
    """Format the figures for people."""
    rows = [("FIGURE", "MEDIAN", "QUARTILES", "BOUND", "N", "", "NOTE")]
    for f in figures:
        quartiles = "" if f.low is None else f"{f.low:g}-{f.high:g}"
        verdict = {True: "ok", False: "MISSED", None: ""}[f.holds]
        bound = "" if f.bound is None else f"{f.bound:g}"
        rows.append(
            (f.name, f"{f.value:g} {f.unit}", quartiles, bound, str(f.samples), verdict, f.note)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[6]])
        for row in rows
    )
