"""When a rank that was told of another's end has waited long enough for its main thread."""

import time

import pytest

from project.errors import Cause
from project.survive.failure import LostRanks

FAILED, KILLED = Cause("rank 1 on h1 has failed: KeyError: 'broken'"), Cause("rank 2 on h2 was killed by signal 9.")


@pytest.fixture
def lost_ranks() -> LostRanks:
    return LostRanks()


def test_who_was_told_nothing_goes_on(lost_ranks: LostRanks) -> None:
    assert not lost_ranks.exit_due(writing=False)


def test_the_main_thread_may_notice_by_itself_and_a_checkpoint_has_longer(lost_ranks: LostRanks) -> None:
    lost_ranks.note(1, FAILED, has_failed=True)
    assert not lost_ranks.exit_due(writing=False)
    lost_ranks.since = time.monotonic() - 5
    assert lost_ranks.exit_due(writing=False)
    assert not lost_ranks.exit_due(writing=True)
    lost_ranks.since = time.monotonic() - 61
    assert lost_ranks.exit_due(writing=True)


def test_an_error_would_come_again_and_a_rank_that_was_killed_need_not(lost_ranks: LostRanks) -> None:
    lost_ranks.note(2, KILLED, has_failed=False)
    assert lost_ranks.exit_code == 75
    lost_ranks.note(1, FAILED, has_failed=True)
    assert lost_ranks.exit_code == 1


def test_a_rank_that_has_gone_with_its_host_need_not_go_again(lost_ranks: LostRanks) -> None:
    assert lost_ranks.exit_code == 1  # it may be that nobody could have said anything
    lost_ranks.unexplained = True
    assert lost_ranks.exit_code == 75
    lost_ranks.note(1, FAILED, has_failed=True)
    assert lost_ranks.exit_code == 1


def test_another_run_in_this_process_begins_with_no_news(lost_ranks: LostRanks) -> None:
    lost_ranks.note(2, KILLED, has_failed=False)
    lost_ranks.unexplained = True
    lost_ranks.clear()
    assert lost_ranks.exit_code == 1
    assert not lost_ranks.wait(0)
    assert not lost_ranks.exit_due(writing=False)
