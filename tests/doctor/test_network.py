"""The results that follow from measured times."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from project.doctor.network import bus_bandwidth, fitted_seconds, rounds, slow_links


@given(st.integers(2, 12))
def test_every_two_meet_once_and_nobody_is_in_two_pairs_at_once(count):
    made = rounds(range(count))
    assert sorted(tuple(sorted(pair)) for pairs in made for pair in pairs) == list(combinations(range(count), 2))
    for pairs in made:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members))


def test_a_large_cluster_is_measured_in_part():
    assert len(rounds(range(100))) == 16


ALIKE = dict.fromkeys(combinations(range(5), 2), 100.0)


@pytest.mark.parametrize(
    ("speeds", "hosts", "links"),
    [
        (ALIKE, [], []),
        ({**ALIKE, (1, 3): 10.0}, [], [(1, 3)]),
        ({**ALIKE, **{pair: 10.0 for pair in ALIKE if 2 in pair}}, [2], []),
        ({(0, 1): 100.0, (0, 2): 10.0, (1, 2): 12.0}, [2], []),  # two of three slow links are one slow host
        ({(0, 1): 1.0}, [], []),  # nothing to be compared with
        ({}, [], []),
    ],
)
def test_a_slow_host_is_told_from_a_slow_link(speeds, hosts, links):
    assert slow_links(speeds)[:2] == (hosts, links)


def test_the_cost_goes_through_the_smallest_and_the_largest_message():
    times = {4096: 1e-3, 1 << 20: 1.1e-2}
    assert fitted_seconds(times, 1 << 20) == pytest.approx(1.1e-2)
    assert fitted_seconds(times, 1 << 21) == pytest.approx(2.1e-2)
    assert fitted_seconds({4096: 1e-3}, 1 << 20) == 1e-3
    assert bus_bandwidth(1000, 1.0, 2) == 1000  # what one of two ranks sends
