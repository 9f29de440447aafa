"""The statistics and the pairing of `make compare`."""

import json
from math import inf
from pathlib import Path

import pytest
from tests.compare import __main__ as program
from tests.compare.figures import better_of, read, read_all
from tests.compare.ratios import Better, compare, lower_bound, upper_bound, worse_by
from tests.compare.trees import HERE, PROGRAMS, Tree, chosen, sizes

TREES = [Tree("a", HERE, "aa"), Tree("b", HERE, "bb"), Tree("new", HERE, "cc")]


@pytest.mark.parametrize(("count", "place"), [(5, 5), (8, 7), (12, 10), (13, 10), (20, 15)])
def test_the_bound_is_the_order_statistic_of_the_sign_test(count: int, place: int) -> None:
    """The positions are those of printed tables of one-sided 95 % limits of a median."""
    values = [float(n) for n in range(count, 0, -1)]
    assert upper_bound(values) == place
    assert lower_bound(values) == count + 1 - place


@pytest.mark.parametrize("count", range(5))
def test_fewer_than_five_rounds_bound_nothing(count: int) -> None:
    assert upper_bound([1.0] * count) is None


def test_a_ratio_above_one_is_worse_in_either_direction() -> None:
    assert worse_by(10, 12, Better.LOWER) == 1.2
    assert worse_by(12, 10, Better.HIGHER) == 1.2
    assert worse_by(0, 0, Better.LOWER) == 1
    assert worse_by(0, 1, Better.LOWER) == inf


def test_figures_are_paired_by_round_and_not_by_place() -> None:
    """A round that only one tree has finished does not count."""
    found = compare("x", Better.LOWER, {1: 10, 2: 20, 3: 40}, {3: 44, 2: 22})
    assert found is not None
    assert found.ratios == (1.1, 1.1)
    assert (found.old, found.new, found.holds) == (30, 33, None)
    assert compare("x", Better.LOWER, {1: 10}, {2: 10}) is None


def test_twelve_rounds_hold_or_do_not() -> None:
    old = dict.fromkeys(range(12), 10.0)
    for worse, holds in ((2, True), (3, False)):
        new = {number: 20.0 if number < worse else 10.5 for number in range(12)}
        found = compare("x", Better.LOWER, old, new)
        assert found is not None
        assert found.holds is holds


def test_figures_of_all_programs_are_read_and_judged_by_their_names() -> None:
    bench = '{"name": "create to told Running, CNI bridge", "value": 1.1, "unit": "s"}'
    assert read("bench", [bench]) == {"bench: create to told Running, CNI bridge": 1.1}
    cpu = '{"netd": 2, "imaged": 1, "controller": 3, "nodeagent": 4, "nats-server": 5}'
    storm = f'{{"figure": "starts", "guests": 6, "per_s": 0.9, "cpu_ms_per_vm": {cpu}}}'
    read_storm = read_all({"bench": [bench], "storm": [storm]})
    assert read_storm["bench: create to told Running, CNI bridge"] == 1.1
    assert read_storm["storm: starts.per_s"] == 0.9
    assert read_storm["storm: starts.cpu_ms_per_vm.ours"] == 10
    assert "storm: starts.guests" not in read_storm
    assert better_of("storm: starts.per_s") is Better.HIGHER


def test_counts_of_instructions_are_judged() -> None:
    counted = '{"figure": "create", "million_per_vm": {"controller": 7.5, "simulated": 17.0}}'
    assert read("instructions", [counted]) == {
        "instructions: create.million_per_vm.controller": 7.5,
        "instructions: create.million_per_vm.simulated": 17.0,
    }
    assert better_of("instructions: create.million_per_vm.controller") is Better.LOWER


def test_each_tree_is_first_as_often_as_the_others() -> None:
    rounds = [program.order(number, ["a", "b", "new"]) for number in range(1, 7)]
    assert {one[0] for one in rounds} == {"a", "b", "new"}
    assert all(sum(one[0] == name for one in rounds) == 2 for name in ("a", "b", "new"))
    assert all(sorted(one) == ["a", "b", "new"] for one in rounds)


def test_an_extra_program_runs_only_where_it_is_named() -> None:
    assert not {one.name for one in chosen("")} & {"ten", "netd", "instructions"}
    assert [one.name for one in chosen("netd")] == ["netd"]


def test_every_program_has_rounds_for_a_bound() -> None:
    assert all(one.rounds >= 12 for one in PROGRAMS)


def test_several_old_trees_are_compared_in_one_call() -> None:
    options = program.options_of(["--old", "one", "--old", "two", "--rounds", "3"])
    assert options.old == ["one", "two"]


def test_a_call_continues_the_rounds_of_the_same_trees_and_sizes(tmp_path: Path) -> None:
    commits = {tree.name: tree.commit for tree in TREES}
    run = {"program": "load", "round": 1, "sizes": sizes(), "trees": commits, "figures": {}}
    others = [run | {"trees": commits | {"new": "other"}}, run | {"sizes": "other"}]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (*others, run)))
    assert program.finished(path, TREES) == [run]
    assert program.finished(tmp_path / "missing", TREES) == []


def test_a_judged_figure_that_the_new_tree_lost_is_named_and_one_that_it_gained_is_not() -> None:
    old, new = {"bench: a": 1.0, "bench: b": 2.0}, {"bench: a": 1.0, "bench: c": 3.0}
    runs = [{"round": 1, "figures": {"a": old, "new": new}}]
    found, lost = program.comparisons(runs, "a")
    assert [one.name for one in found] == ["bench: a"]
    assert lost == ["bench: b"]


def test_the_control_shows_the_bound_of_two_measurements_of_one_tree() -> None:
    values = [{"a": 10.0, "new": 10.0, "control": 10.0 + number} for number in range(1, 6)]
    runs = [
        {"round": number, "figures": {tree: {"bench: a": one} for tree, one in figures.items()}}
        for number, figures in enumerate(values)
    ]
    (found,), _ = program.comparisons(runs, "a")
    (control,), _ = program.comparisons(runs, "a", "control")
    assert (found.upper, control.upper) == (1.0, 1.5)
    assert "1.500" in program.table([found], [control])
