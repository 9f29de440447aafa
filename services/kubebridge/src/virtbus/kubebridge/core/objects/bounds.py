"""Bounds the number of values of a JSON text before it is parsed."""


def values_at_most(text: str) -> int:
    """Return an upper bound of the number of values in a JSON text.

    The bound is 1 plus the number of commas, `[` and `{`. Characters within strings count too, so
    the bound may be too high but never too low.
    """
    return 1 + sum(map(text.count, ",[{"))


def check_values(text: str, most: int) -> None:
    """Raise a ValueError if a JSON text may contain more than `most` values."""
    if values_at_most(text) > most:
        msg = f"it holds more than {most} values; make the object smaller"
        raise ValueError(msg)
