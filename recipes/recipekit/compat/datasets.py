"""datasets: settings in variables of the library's module `config`."""


def skip_shutdown_sleep() -> None:
    """Remove the sleep that follows when a Parquet reader is closed early.

    Why: datasets sleeps 5 s to avoid a pyarrow crash at interpreter exit, which occurs if pyarrow's
        threads still read a Python file (apache/arrow#45214). Our readers use no read-ahead and are
        closed long before exit.
    Version: datasets 5.2
    Test: tests/compat/test_datasets.py::test_a_reader_that_is_closed_early_does_not_sleep
    Until: datasets does not sleep there.
    """
    from datasets import config

    config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0


def skip_read_retries() -> None:
    """Send a request to a busy server only once.

    Why: datasets tries twenty times, 5 to 60 s apart, regardless of the time limit. `RetryPolicy`
        in data/remote.py decides about retries instead.
    Version: datasets 5.2
    Test: tests/compat/test_datasets.py::test_a_busy_server_is_asked_once
    Until: datasets accepts the number of attempts as an argument.
    """
    from datasets import config

    config.STREAMING_READ_MAX_RETRIES = config.STREAMING_OPEN_MAX_RETRIES = 1
