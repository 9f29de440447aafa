"""The statistics and the pairing of `make compare`."""

from math import inf

import pytest
from tests.compare import __main__ as program
from tests.compare.figures import better_of, read
from tests.compare.ratios import Better, compare, upper_bound, worse_by
from tests.compare.trees import HERE, Tree, chosen

OLD, NEW = Tree("old", HERE, "a"), Tree("new", HERE, "b")


@pytest.mark.parametrize(("count", "place"), [(5, 5), (8, 7), (12, 10), (13, 10), (20, 15)])
def test_the_bound_is_the_order_statistic_of_the_sign_test(count: int, place: int) -> None:
    """The positions are those of printed tables of one-sided 95 % limits of a median."""
    assert upper_bound([float(n) for n in range(count, 0, -1)]) == place


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


def test_figures_of_all_three_programs_are_read_and_judged_by_their_names() -> None:
    bench = '{"name": "create to told Running, CNI bridge", "value": 1.1, "unit": "x raw"}\n'
    assert read("bench", bench) == {"bench: create to told Running, CNI bridge": 1.1}
    cpu = '{"netd": 2, "imaged": 1, "controller": 3, "nodeagent": 4, "nats-server": 5}'
    storm = f'{{"figure": "starts", "guests": 6, "share": 0.9, "cpu_ms_per_vm": {cpu}}}'
    read_storm = read("storm", storm)
    assert read_storm["storm: starts.share"] == 0.9
    assert read_storm["storm: starts.cpu_ms_per_vm.ours"] == 10
    assert "storm: starts.guests" not in read_storm
    assert better_of("storm: starts.share") is Better.HIGHER
    assert better_of("bench: delete to told gone over raw destroy, CNI bridge") is Better.TOLD


def test_each_tree_is_first_as_often_as_the_other_and_in_turn() -> None:
    turns = program.planned(2, chosen(""), [OLD, NEW])
    firsts = [turn[0]["tree"] for turn in turns]
    assert firsts.count("old") == firsts.count("new")
    half = len(firsts) // 2
    assert all(a != b for a, b in zip(firsts[:half], firsts[half:], strict=True))


def test_an_extra_program_runs_only_where_it_is_named() -> None:
    names = [one.name for one in chosen("")]
    assert names == ["bench creates", "bench others", "storm", "load"]
    assert [one.name for one in chosen("netd")] == ["bench netd"]


def test_a_judged_figure_that_the_new_tree_lost_is_named_and_one_that_it_gained_is_not() -> None:
    runs = [
        {"round": 1, "tree": "old", "figures": {"bench: a": 1.0, "bench: b": 2.0}},
        {"round": 1, "tree": "new", "figures": {"bench: a": 1.0, "bench: c": 3.0}},
    ]
    found, lost = program.comparisons(runs)
    assert [one.name for one in found] == ["bench: a"]
    assert lost == ["bench: b"]


def test_the_control_shows_the_bound_of_two_measurements_of_one_tree() -> None:
    runs = [
        {"round": number, "tree": tree, "figures": {"bench: a": value}}
        for number in range(1, 6)
        for tree, value in (("old", 10.0), ("new", 10.0), ("control", 10.0 + number))
    ]
    (found,), _ = program.comparisons(runs)
    (control,), _ = program.comparisons(runs, "control")
    assert (found.upper, control.upper) == (1.0, 1.5)
    assert "1.500" in program.table([found], [control])
