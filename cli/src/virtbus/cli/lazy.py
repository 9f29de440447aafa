"""Command groups that import a verb's module at a call of the verb."""

import importlib
from collections.abc import Mapping
from typing import Any

import click

Verbs = Mapping[str, tuple[str, str]]
"""The command and help line of each verb. The command is `module:attribute`; `module` alone means
`module:command`."""


class LazyGroup(click.Group):
    """A group with a table of its verbs. The table gives the group's help without imports."""

    def __init__(self, *args: Any, verbs: Verbs | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._verbs = dict(verbs or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        entry = self._verbs.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry[0].partition(":")
        command = getattr(importlib.import_module(module), attribute or "command")
        if not isinstance(command, click.Command):
            msg = f"{entry[0]} is no click command"
            raise TypeError(msg)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._verbs and not args[0].startswith("-"):
            import difflib  # only for a typo

            near = difflib.get_close_matches(args[0], self._verbs, n=1)
            did_you_mean = f" Did you mean {near[0]!r}?" if near else ""
            known = ", ".join(self._verbs)
            ctx.fail(f"No such command {args[0]!r}.{did_you_mean} There are: {known}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._verbs.items()])


def examples(text: str) -> str:
    """Return an epilog that shows the lines of `text` without their indentation.

    A leading `|` in a line keeps the spaces after the `|`.
    """
    lines = [line.strip().removeprefix("|") for line in text.strip().splitlines()]
    # \b keeps click from wrapping a paragraph. Each paragraph needs its own \b.
    body = "\n".join(f"  {line}" if line else "\n\b" for line in lines)
    return f"\b\nExamples:\n{body}"
