"""Parses durations in option values."""

import math

import click

from virtbus.cli import units


def whole_seconds(_context: click.Context, _option: click.Parameter, text: str) -> int:
    """Return an option's time in seconds, rounded up."""
    try:
        return math.ceil(units.seconds_of(text))
    except ValueError:
        message = f"{text!r} is no time; write 30s, 5m or 2h"
        raise click.BadParameter(message) from None
