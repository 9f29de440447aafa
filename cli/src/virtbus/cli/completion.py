"""Implements `virtbus completion`."""

import click
from click.shell_completion import get_completion_class

from virtbus.cli import output
from virtbus.cli.commands import virtbus
from virtbus.cli.failures import usage
from virtbus.cli.lazy import examples


@click.command(
    epilog=examples(
        """
        virtbus completion bash > /etc/bash_completion.d/virtbus
        virtbus completion zsh > "${fpath[1]}/_virtbus"
        virtbus completion fish > ~/.config/fish/completions/virtbus.fish
        source <(virtbus completion bash)            only for this shell
        """
    )
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def command(shell: str) -> None:
    """Print the completion script for SHELL.

    The script also completes the names of objects on the bus, such as VMs, volumes and nodes.
    """
    completer = get_completion_class(shell)
    if completer is None:
        raise usage(f"there is no completion for {shell}")
    instance = completer(virtbus, {}, "virtbus", "_VIRTBUS_COMPLETE")
    # click's source() would start bash, just for a warning about old versions.
    output.write(instance.source_template % instance.source_vars())
