"""What is made of measured times."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from project.doctor.network import bus_bandwidth, fit, rounds, slow_links


@given(st.integers(2, 12))
def test_every_two_meet_once_and_nobody_is_in_two_pairs_at_once(count):
    made = rounds(range(count))
    pairs = [tuple(sorted(pair)) for one in made for pair in one]
    assert sorted(pairs) == list(combinations(range(count), 2))
    for one in made:
        members = [member for pair in one for member in pair]
        assert len(members) == len(set(members))


def test_a_large_cluster_is_measured_in_part():
    assert len(rounds(range(100))) == 16


def test_a_slow_host_is_told_from_a_slow_link():
    speeds = dict.fromkeys(combinations(range(5), 2), 100.0)
    assert slow_links(speeds)[:2] == ([], [])
    assert slow_links({**speeds, (1, 3): 10.0})[:2] == ([], [(1, 3)])
    assert slow_links({**speeds, **{pair: 10.0 for pair in speeds if 2 in pair}})[:2] == ([2], [])


def test_two_of_three_slow_links_are_one_slow_host():
    assert slow_links({(0, 1): 100.0, (0, 2): 10.0, (1, 2): 12.0})[0] == [2]


def test_one_link_has_nothing_to_be_compared_with():
    assert slow_links({(0, 1): 1.0})[:2] == ([], [])
    assert slow_links({})[:2] == ([], [])


def test_the_model_goes_through_the_smallest_and_the_largest_message():
    model = fit({4096: 1e-3, 1 << 20: 1.1e-2})
    assert model.latency == 1e-3
    assert model.seconds(1 << 20) == pytest.approx(1.1e-2)


def test_the_bus_bandwidth_of_two_ranks_is_what_one_of_them_sends():
    assert bus_bandwidth(1000, 1.0, 2) == 1000
