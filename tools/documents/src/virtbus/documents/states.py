"""Generates docs/reference/states.md: the tables of states, as diagrams and lists."""

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from virtbus.controller.core import vm_states
from virtbus.nodeagent.core import uid_table
from virtbus.nodeagent.vm import machine
from virtbus.nodeagent.vm.status import VISIBLE
from virtbus.schemas import operation

EVERYWHERE = 8
"""The diagrams omit an event that leads to one state from more than this number of states."""

Rows = list[tuple[str, str, str, str]]
"""Rows of state, event, next state, and actions."""


def page() -> str:
    """Return the whole page."""
    return "\n".join(
        ["# Lifecycles", "", *_of_users(), *_of_agents(), *_of_uids(), *_of_operations()]
    )


def _of_users() -> list[str]:
    return [
        "## The VM as users see it",
        "",
        f"From `STATES` in `{vm_states.__name__}`. The first row that holds decides.",
        "",
        "| State | Condition |",
        "|---|---|",
        *(f"| {row.state or 'the reported state'} | {row.when} |" for row in vm_states.STATES),
        "",
        "The node's agent reports each phase of its own table, which follows below, as a state "
        "(`VISIBLE`):",
        "",
        "| Phase | State |",
        "|---|---|",
        *(f"| {phase} | {state} |" for phase, state in VISIBLE.items()),
        "",
        "So these are the changes of the reported state:",
        "",
        *_drawn(_reported(), VISIBLE["new"]),
        "",
    ]


def _of_agents() -> list[str]:
    held = [_agent_row(key, row) for key, row in machine.TABLE.items()]
    ends = [_agent_row(key, row) for key, row in machine.BY_STRATEGY.items()]
    control = [_agent_row(key, row) for key, row in machine.CONTROL.items()]
    return [
        "## The VM as its node's agent sees it",
        "",
        f"From `TABLE` in `{machine.__name__}`.",
        "",
        *_drawn(held, "new"),
        "",
        *_listed(held, ("Phase", "Event", "Next", "Actions")),
        "",
        "The run strategy decides the next phase after a running guest ends by itself "
        "(`BY_STRATEGY`):",
        "",
        *_listed(ends, ("Run strategy", "Event", "Next", "Actions")),
        "",
        "## The rights of the agent on the VM",
        "",
        "From `CONTROL` in the same module, the second table.",
        "",
        *_drawn(control, "following"),
        "",
        *_listed(control, ("State", "Signal", "Next", "Effects")),
        "",
    ]


def _of_operations() -> list[str]:
    rows: Rows = [(*key, after, "") for key, after in operation.TABLE.items()]
    return [
        "## An operation",
        "",
        f"From `TABLE` in `{operation.__name__}` (ADR 0048). The steps of each kind (`STEPS`):",
        "",
        *(f"- {kind}: {_steps(steps)}" for kind, steps in operation.STEPS.items()),
        "",
        *_drawn(rows, operation.OperationPhase.ACCEPTED),
        "",
        *_listed(rows, ("Phase", "Event", "Next")),
        "",
    ]


def _steps(steps: Iterable[operation.Step]) -> str:
    return ", ".join(f"{step.name} (final)" if step.final else step.name for step in steps)


def _of_uids() -> list[str]:
    listings = _listings()
    reactions: Rows = [(*key, ", ".join(row), "") for key, row in uid_table.REACTIONS.items()]
    return [
        "## A uid, as the agent knows it",
        "",
        f"From `{uid_table.__name__}`. The last message of the bus about a uid "
        "(`LISTINGS`, `FROM_ANY`):",
        "",
        *_drawn(listings, "unknown"),
        "",
        *_listed(listings, ("State", "Word", "Next")),
        "",
        "The reaction depends on the part of the VM that the host has (`REACTIONS`):",
        "",
        *_listed(reactions, ("The host has", "Word", "Reactions")),
        "",
        "After a complete list of the joined bus, each actor follows its word (`AFTER_LIST`). "
        "After a list of another bus, all are held:",
        "",
        "| State | Reaction |",
        "|---|---|",
        *(f"| {state} | {reaction} |" for state, reaction in uid_table.AFTER_LIST.items()),
        "",
    ]


def _reported() -> Rows:
    """Return the rows of the agent's tables that change the reported state, without repetitions."""
    steps = [(phase, event, row[0]) for (phase, event), row in machine.TABLE.items()]
    steps += [
        (phase, event, row[0])
        for (_, event), row in machine.BY_STRATEGY.items()
        for phase in sorted(machine.ALIVE)
    ]
    shown = [(VISIBLE[phase], event, VISIBLE[after]) for phase, event, after in steps]
    changes = dict.fromkeys(row for row in shown if row[0] is not row[2])
    return [(str(state), str(event), str(after), "") for state, event, after in changes]


def _agent_row(key: tuple[Any, Any], row: tuple[Any, Iterable[Any]]) -> tuple[str, str, str, str]:
    following, actions = row
    return str(key[0]), str(key[1]), str(following), ", ".join(map(str, actions))


def _listings() -> Rows:
    """Return all changes of a uid's listing."""
    rows: Rows = []
    for state in get_args(uid_table.Listing):
        for word in get_args(uid_table.Word):
            after = uid_table.LISTINGS.get((state, word), uid_table.FROM_ANY.get(word, state))
            if after != state:
                rows.append((state, word, after, ""))
    return rows


def _node(state: str) -> str:
    return state.replace(", ", "_").replace(" ", "_")


def _drawn(rows: Rows, first: str) -> list[str]:
    """Return a mermaid diagram, below lines for the events that the diagram omits."""
    sources: dict[tuple[str, str], list[str]] = {}
    for state, event, following, _ in rows:
        sources.setdefault((event, following), []).append(state)
    wide = {key for key, states in sources.items() if len(states) > EVERYWHERE}
    lines = []
    for event, following in sorted(wide):
        states = ", ".join(sorted(sources[event, following]))
        lines += [f"Not drawn: `{event}` leads to `{following}` from {states}.", ""]
    edges: dict[tuple[str, str], list[str]] = {}
    for state, event, following, _ in rows:
        if (event, following) not in wide:
            edges.setdefault((state, following), []).append(event)
    return [*lines, "```mermaid", "stateDiagram-v2", *_edges(edges, first), "```"]


def _edges(edges: Mapping[tuple[str, str], list[str]], first: str) -> list[str]:
    names = dict.fromkeys(name for pair in edges for name in pair if _node(name) != name)
    return [
        *(f"    {_node(name)} : {name}" for name in names),
        f"    [*] --> {_node(first)}",
        *(
            f"    {_node(state)} --> {_node(following)} : {' / '.join(events)}"
            for (state, following), events in edges.items()
        ),
    ]


def _listed(rows: Rows, heads: tuple[str, ...]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(row[: len(heads)]).rstrip() + " |" for row in rows),
    ]
