"""The entry point: runs a verb and turns every end of it into an exit code."""

import contextlib
import os
import sys

import click

from virtbus.cli import output
from virtbus.cli.commands import virtbus
from virtbus.cli.failures import CliError, Exit

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = int(Exit.OK)
    try:
        virtbus.main(arguments, prog_name="virtbus", standalone_mode=False)
        sys.stdout.flush()
    except CliError as error:
        code = _fail(error, arguments)
    except click.exceptions.NoArgsIsHelpError as error:
        output.write(error.format_message(), sys.stderr)
        code = int(Exit.USAGE)
    except click.ClickException as error:
        code = _fail(_usage(error), arguments)
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # the reader (head, less) has enough; keep the interpreter's own flush from complaining
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _usage(error: click.ClickException) -> CliError:
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context is not None else "virtbus"
    hint = f"`{path} --help` shows what it takes, with examples"
    return CliError(Exit.USAGE, "usage", error.format_message(), hint=hint)


def _fail(error: CliError, arguments: list[str]) -> int:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    if _wants_json(arguments):
        output.write(output.as_json(error.as_map()), sys.stderr)
    else:
        first, *rest = [output.safe(line) for line in error.as_lines()]
        word, _, text = first.partition(": ")
        painted = f"{output.paint(word, '31', sys.stderr)}: {text}"
        output.write("\n".join([painted, *rest]), sys.stderr)
    return int(error.exit_code)


def _wants_json(arguments: list[str]) -> bool:
    """Whether `-o json` was asked for; also where the rest of the line could not be parsed."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return any(
        argument in {"-ojson", "--output=json"}
        or (argument in {"-o", "--output"} and value == "json")
        for argument, value in pairs
    )


if __name__ == "__main__":
    sys.exit(main())
