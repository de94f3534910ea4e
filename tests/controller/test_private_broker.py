"""One broker a store, found again by whoever comes next."""

import os
import signal

import pytest

from services.controller.launchers.broker import PrivateBroker, serving
from shared.broker import BrokerError
from shared.sections import BrokerConfig
from tests.shared.runs import make_config, until


@pytest.fixture
def private(tmp_path):
    broker = PrivateBroker(tmp_path, BrokerConfig())
    yield broker
    broker.stop()


def test_a_second_one_takes_over_the_first_and_can_end_it(private, tmp_path):
    private.start()
    second = PrivateBroker(tmp_path, BrokerConfig()).start()
    assert (second.url, second.pid) == (private.url, private.pid)
    second.stop()
    assert not private.running


def test_it_comes_back_at_the_same_address(private, tmp_path):
    url = private.start().url
    private.stop()
    again = PrivateBroker(tmp_path, BrokerConfig()).start()
    assert again.url == url
    again.stop()


async def test_a_killed_one_is_started_again(private):
    url = private.start().url
    os.kill(private.pid, signal.SIGKILL)
    await until(lambda: not private.running, "the broker is gone")
    private.restart()
    assert private.running
    assert private.url == url


def test_a_number_that_another_process_has_by_now_is_not_the_broker(private, tmp_path):
    (tmp_path / "broker.json").write_text(f'{{"url": "nats://127.0.0.1:1", "pid": {os.getpid()}, "port": 1}}')
    assert not private.found()


def test_half_a_file_is_no_broker(private, tmp_path):
    (tmp_path / "broker.json").write_text('{"url": "na')
    assert not private.found()


async def test_serving_a_run_that_was_never_started_says_so(tmp_path):
    with pytest.raises(BrokerError, match="no run here"):
        async with serving(make_config("demo", workdir=str(tmp_path / "nowhere"))):
            pass


async def test_serving_starts_the_store_for_the_time_of_a_command(private, tmp_path):
    private.start()
    private.stop()
    config = make_config("demo", workdir=str(tmp_path))
    async with serving(config) as url:
        assert PrivateBroker(tmp_path, BrokerConfig()).found()
        assert url.startswith("nats://127.0.0.1:")
    assert not PrivateBroker(tmp_path, BrokerConfig()).found()
