"""Implements `virtbus vm trace`."""

import click

from virtbus.cli import output
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.vm.history import stored, uid_of
from virtbus.cli.vm.span_tree import SpanNode, draw, is_creation, of_creation, spans_of
from virtbus.cli.vm.target import name_argument, namespace_option


@click.command(
    epilog=examples(
        """
        virtbus vm trace web
        virtbus vm trace web --all          also later work: stop, start, delete
        virtbus vm trace web -o json
        """
    )
)
@name_argument
@click.option(
    "--all", "every", is_flag=True, help=("Show all traces of the VM, not only its creation.")
)
@namespace_option
@verb
def command(invocation: Invocation, *, name: str, every: bool, namespace: str) -> None:
    """Show the steps that created the VM NAME, as a tree with their durations."""
    uid = uid_of(invocation, name, namespace)
    traces = _traces(invocation, uid)
    if not traces:
        raise CliError(
            Exit.NOT_FOUND,
            "no_trace",
            f"no trace of {name} is stored",
            hint="traces are kept for 72 hours; services send them a moment after the work",
        )
    creation = next((spans for spans in traces if is_creation(spans)), None)
    shown = traces if every else [of_creation(creation or traces[0])]
    value = {
        "traces": [
            {"trace_id": spans[0].trace_id, "spans": [span.as_map() for span in spans]}
            for spans in shown
        ]
    }
    invocation.show(value, lambda: "\n\n".join(draw(spans) for spans in shown))
    if not every and creation is None:
        invocation.note("the steps that created it are not stored; this is its oldest stored work")
    if not every and len(traces) > 1:
        invocation.note(f"{len(traces) - 1} more with --all")
    output.flush()


def _traces(invocation: Invocation, uid: str) -> list[list[SpanNode]]:
    """Return a VM's stored spans as one list per trace, the oldest trace first."""
    found: dict[str, list[SpanNode]] = {}
    for span in spans_of(stored(invocation, uid=uid, spans=True)):
        found.setdefault(span.trace_id, []).append(span)
    return sorted(found.values(), key=lambda spans: min(span.start_ns for span in spans))
