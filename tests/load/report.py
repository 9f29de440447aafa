"""A run's figures for people: a table and plots."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.load.population import Population
from tests.load.world import Shape


def table(shape: Shape, figures: Mapping[str, Mapping[str, Any]], holds: Mapping[str, bool]) -> str:
    """Markdown, as `docs/explanation/performance.md` has it."""
    made, bare = figures["creates"], figures["floor"]
    rows = [
        ("creates accepted", f"{made['accepted_per_s']} /s"),
        ("creates running", f"{made['running_per_s']} /s"),
        ("floor, before and after", f"{bare['creates_per_s']} /s"),
        ("the same without facts", f"{bare['without_facts_per_s']} /s"),
        ("the floor with one create in flight", f"{bare['one_in_flight_per_s']} /s"),
        ("accepted / floor", f"{bare['accepted_share']}"),
        ("accepted / floor without facts", f"{bare['accepted_share_without_facts']}"),
        ("accepted / floor, one in flight", f"{bare['accepted_share_one_in_flight']}"),
        ("running / floor", f"{bare['running_share']}"),
        ("request to accepted, ms", _spread(made["accepted_ms"])),
        ("request to running, ms", _spread(made["running_ms"])),
        ("last accepted to all running", f"{made['convergence_s']} s"),
        ("CPU ms per VM", _each(made["cpu_ms_per_vm"])),
        ("bus per VM", _each(made["bus_per_vm"])),
        ("status puts, facts per VM", f"{made['status_puts_per_vm']}, {made['facts_per_vm']}"),
        ("PSS MiB", _each(made["pss_mib"])),
        ("PSS KiB per VM", _each(made["pss_kib_per_vm"])),
    ]
    if "churn" in figures:
        churn, gone = figures["churn"], figures["deletes"]
        rows += [
            ("controller killed, successor synced", f"{churn['controller_synced_s']} s"),
            ("churn: running, ms", _spread(churn["running_ms"])),
            ("idle, cores", _each(figures["idle full"]["cores"])),
            ("deletes gone", f"{gone['gone_per_s']} /s"),
            ("delete to gone, ms", _spread(gone["gone_ms"])),
            ("delete CPU ms per VM", _each(gone["cpu_ms_per_vm"])),
        ]
    rows += [(name, "ok" if held else "MISSED") for name, held in holds.items()]
    head = [f"| {shape.vms} VMs, {shape.nodes} nodes, {shape.bus} | |", "|---|---|"]
    return "\n".join([*head, *(f"| {name} | {value} |" for name, value in rows)])


def _spread(ms: Mapping[str, float]) -> str:
    return " / ".join(f"{name} {value:g}" for name, value in ms.items())


def _each(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def plot(path: Path, shape: Shape, population: Population) -> None:
    """Plot the counts over time, and the latencies of all creates, as one PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    begun = population.samples[0][0]
    at_s = [moment - begun for moment, *_ in population.samples]
    figure, (counts, latencies) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for index, name in ((1, "accepted"), (2, "running"), (3, "gone")):
        counts.plot(at_s, [sample[index] for sample in population.samples], label=name)
    counts.set(xlabel="seconds", ylabel="VMs", title=f"{shape.vms} VMs, {shape.nodes} nodes")
    counts.legend()
    counts.grid(alpha=0.3)
    vms = list(population.vms.values())
    accepted = sorted((vm.accepted_s - vm.asked_s) * 1000 for vm in vms if vm.accepted_s)
    running = sorted((vm.running_s - vm.asked_s) * 1000 for vm in vms if vm.running_s)
    for values, name in ((accepted, "accepted"), (running, "running")):
        shares = [(rank + 1) / len(values) for rank in range(len(values))]
        latencies.plot(values, shares, label=f"request to {name}")
    latencies.set(xscale="log", xlabel="ms", ylabel="share of VMs", title=f"latency, {shape.bus}")
    latencies.legend()
    latencies.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
