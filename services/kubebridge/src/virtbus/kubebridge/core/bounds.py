"""Bounds of a JSON text, checked before it is parsed."""


def values_at_most(text: str) -> int:
    """No JSON text has more values than this: one after each comma and opening bracket.

    Those within strings count too, so it may be too many, never too few.
    """
    return 1 + sum(map(text.count, ",[{"))


def check_values(text: str, most: int) -> None:
    """ValueError where a JSON text may hold more values than `most`."""
    if values_at_most(text) > most:
        msg = f"it holds more than {most} values; make the object smaller"
        raise ValueError(msg)
