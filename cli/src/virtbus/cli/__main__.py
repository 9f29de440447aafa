"""Runs the `virtbus` command and turns its result into an exit code."""

import virtbus.cli.quick_start as _  # noqa: F401  before all other imports

import contextlib
import os
import sys

import click

from virtbus.cli import output
from virtbus.cli.commands import virtbus
from virtbus.cli.failures import CliError, Exit

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (None: the process's own); return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    stdout = sys.stdout
    try:
        virtbus.main(arguments, prog_name="virtbus", standalone_mode=False)
        sys.stdout.flush()
    except (CliError, click.ClickException) as error:
        return _fail(error, arguments)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
    except OSError as error:
        _silence_stdout()
        return _fail(_unexpected(error), arguments)
    except SystemExit:
        # If the reader of the output ends early, click wraps stdout and exits with 1.
        if sys.stdout is stdout:
            raise
        _silence_stdout()
    return int(Exit.OK)


def _silence_stdout() -> None:
    """Redirect stdout to /dev/null, because Python's flush at exit would report a broken pipe."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unexpected(error: OSError) -> CliError:
    why = error.strerror or str(error)
    message = f"{error.filename}: {why}" if error.filename else f"the output failed: {why}"
    hint = "free space, or choose another place for the output or the files"
    return CliError(Exit.REFUSED, "os_error", message, hint=hint)


def _usage(error: click.ClickException, arguments: list[str]) -> CliError:
    path, verb = _meant(arguments)
    message = error.format_message()
    if isinstance(error, click.BadOptionUsage):
        options = [one for one in verb.params if error.option_name in one.opts]
        choices = [one.type.choices for one in options if isinstance(one.type, click.Choice)]
        message += "".join(f" One of: {', '.join(map(str, each))}." for each in choices)
    hint = f"`{path} --help` shows what it takes, with examples"
    return CliError(Exit.USAGE, "usage", message, hint=hint)


def _meant(arguments: list[str]) -> tuple[str, click.Command]:
    """Return the command's path and the command, ignoring words that are no command."""
    path = "virtbus"
    found: click.Command = virtbus
    for word in arguments:
        if not isinstance(found, click.Group):
            break
        inner = found.get_command(click.Context(found), word)
        if inner is not None:
            path, found = f"{path} {word}", inner
    return path, found


def _fail(error: CliError | click.ClickException, arguments: list[str]) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        output.write(error.format_message(), sys.stderr)
        return int(Exit.USAGE)
    if isinstance(error, click.ClickException):
        error = _usage(error, arguments)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if _wants_json(arguments):
        output.write(output.as_json(error.as_map()), sys.stderr)
    else:
        lines = "\n".join(error.as_lines()).split("\n")
        first, *rest = [output.safe(line) for line in lines]
        word, _, text = first.partition(": ")
        painted = f"{output.paint(word, '31', sys.stderr)}: {text}"
        output.write("\n".join([painted, *rest]), sys.stderr)
    return int(error.exit_code)


def _wants_json(arguments: list[str]) -> bool:
    """Return True if `-o json` is given, even in a command line that click cannot parse."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return any(
        argument in {"-ojson", "--output=json"}
        or (argument in {"-o", "--output"} and value == "json")
        for argument, value in pairs
    )


if __name__ == "__main__":
    sys.exit(main())
