"""Settings of datasets that we change, tested with the code of datasets."""

import io
import time
from typing import Any

import pytest
from datasets import config
from datasets.utils import file_utils
from recipekit.compat import datasets as compat


def test_a_reader_that_is_closed_early_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 5)
    compat.skip_shutdown_sleep()
    assert config.SLEEP_TIME_ON_THREADS_SHUTDOWN == 0


def test_a_busy_server_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server disconnects, reads are retried as often as the setting requires."""
    monkeypatch.setattr(config, "STREAMING_READ_MAX_RETRIES", 3)
    monkeypatch.setattr(config, "STREAMING_OPEN_MAX_RETRIES", 3)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    asked: list[int] = []

    class Server(io.BytesIO):
        def read(self, *_: Any) -> bytes:
            asked.append(1)
            raise TimeoutError

    for settle, times in ((lambda: None, 3), (compat.skip_read_retries, 1)):
        settle()
        asked.clear()
        file: Any = Server()
        file_utils._add_retries_to_file_obj_read_method(file)
        with pytest.raises(Exception):  # noqa: B017 - of whichever class datasets raises
            file.read()
        assert len(asked) == times
    assert config.STREAMING_OPEN_MAX_RETRIES == 1
