"""When a rank that was told of another's end has waited long enough for its main thread."""

import time

import pytest

from project.survive.failure import LostRanks


@pytest.fixture
def news() -> LostRanks:
    return LostRanks()


def test_who_was_told_nothing_goes_on(news: LostRanks) -> None:
    assert not news.exit_due(writing=False)


def test_the_main_thread_may_notice_by_itself_and_a_checkpoint_has_longer(news: LostRanks) -> None:
    news.note_failure(1, "rank 1 on h1 has failed: KeyError: 'broken'")
    assert not news.exit_due(writing=False)
    news.since = time.monotonic() - 5
    assert news.exit_due(writing=False)
    assert not news.exit_due(writing=True)
    news.since = time.monotonic() - 61
    assert news.exit_due(writing=True)


def test_an_error_would_come_again_and_a_rank_that_was_killed_need_not(news: LostRanks) -> None:
    news.note_death(2, "rank 2 on h2 was killed by signal 9.")
    assert news.exit_code == 75
    news.note_failure(1, "rank 1 on h1 has failed: KeyError: 'broken'")
    assert news.exit_code == 1


def test_a_rank_that_has_gone_with_its_host_need_not_go_again(news: LostRanks) -> None:
    assert news.exit_code == 1  # it may be that nobody could have said anything
    news.unexplained = True
    assert news.exit_code == 75
    news.note_failure(1, "rank 1 on h1 has failed: KeyError: 'broken'")
    assert news.exit_code == 1


def test_another_run_in_this_process_begins_with_no_news(news: LostRanks) -> None:
    news.note_death(2, "rank 2 on h2 was killed by signal 9.")
    news.unexplained = True
    news.clear()
    assert news.exit_code == 1
    assert not news.wait(0)
    assert not news.exit_due(writing=False)
