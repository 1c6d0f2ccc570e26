"""Recording of a run while it trains.

The record is written to `metrics.jsonl` and to Weights & Biases, and shown as a line on the
terminal.
"""

import contextlib
import importlib.util
import json
import math
import os
import queue
import re
import secrets
import shlex
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..spec.atomic_write import write_atomic
from ..spec.errors import Say
from ..spec.recipe import Recipe
from ..spec.run_folder import METRICS
from .metrics_file import MetricsFile, truncate_metrics
from .progress import ProgressLine

if TYPE_CHECKING:
    import wandb

WANDB_INIT = 30.0  # seconds for W&B's server to answer; after that the run is recorded offline
WANDB_FINISH = 15.0  # seconds for the last uploads; the rest stays in the folder, for `wandb sync`
WANDB_ARTIFACT = 3600.0  # the same with --wandb_artifact, which uploads the model
WANDB_REPEAT = 10.0  # seconds: metrics of this period are sent again to a restarted wandb-core
WANDB_STARTS = 3


@dataclass(frozen=True)
class WandbRun:
    """The W&B run that records a training run: its name, project and attached `config`."""

    name: str
    config: dict[str, Any]
    project: str = Recipe.project
    artifact: bool = False  # True if the exported model may be uploaded at the end of the run
    stopping: Callable[[], bool] = lambda: False  # True if a stop of the run was requested


def open_tracker(
    *, run_dir: Path, is_main: bool, start_step: int, last_step: int, wandb: WandbRun | None
) -> "Tracker | NoTracker":
    """Open this rank's tracker, which records the run if `is_main` and otherwise does nothing.

    `metrics.jsonl` in `run_dir` is truncated after `start_step` and continued. The W&B run's id is
    stored in `run_dir/wandb_id`. If `wandb` is None, there is no W&B run.
    """
    if not is_main:
        return NoTracker()
    run_dir.mkdir(parents=True, exist_ok=True)
    lost = truncate_metrics(run_dir / METRICS, start_step)
    tracker = Tracker(run_dir, last_step)
    if lost:
        tracker.say(lost)
    if wandb:
        tracker.copy_to_wandb(wandb)
    return tracker


class NoTracker:
    """The tracker of every rank except the first. It records nothing."""

    def log(self, metrics: dict[str, Any]) -> None: ...

    def amend(self, more: dict[str, float]) -> None: ...

    def go_back(self, step: int) -> None: ...

    def say(self, text: str) -> None: ...

    def alert(self, title: str, text: str, level: str) -> None: ...

    def doing(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def flush(self) -> None: ...

    def finish(
        self, exit_code: int, picture: Path | None = None, export: Path | None = None
    ) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Rank 0's record of the run.

    It never makes a step fail, not even with a full disk, without W&B, or without a terminal.
    """

    def __init__(self, run_dir: Path, last_step: int):
        self._run_dir = run_dir
        self._line = ProgressLine(last_step)
        self._file = MetricsFile(run_dir / METRICS, self.say)
        self._finished = False
        self._step = 0
        self._wandb: WandbCopy | None = None

    def copy_to_wandb(self, run: WandbRun) -> None:
        """Also record the metrics in a W&B run, if the wandb package is installed."""
        if importlib.util.find_spec("wandb") is not None:
            self._wandb = WandbCopy(run, self._run_dir, self.say)
        else:
            self.say(
                "the package wandb is not installed, so there is no W&B run. The file metrics.jsonl"
                " has the same numbers (--no-wandb hides this line)"
            )

    def log(self, metrics: dict[str, Any]) -> None:
        """Record one optimizer step.

        Floats are written unrounded. Non-finite floats become "NaN", "Infinity" or "-Infinity",
        because JSON has no such numbers.
        """
        self._file.add(
            json.dumps(
                {key: _json_number(value) for key, value in metrics.items()}, allow_nan=False
            )
        )
        if self._wandb:
            self._wandb.log(metrics)
        self._line.show(metrics)
        self._step = metrics["step"]

    def amend(self, more: dict[str, float]) -> None:
        """Add numbers that became known later to the record of the newest step."""
        self._file.amend(json.dumps(more)[1:-1])
        if self._wandb:
            self._wandb.log({"step": self._step} | more)

    def go_back(self, step: int) -> None:
        """Remove the record of the steps after `step`, which follow again. Raises OSError.

        W&B keeps its record, and shows the later values of a step.
        """
        self._file.go_back(step)
        self._step = step

    def alert(self, title: str, text: str, level: str) -> None:
        """Send an alert to W&B. `level` is "warning" or "error"."""
        if self._wandb:
            self._wandb.alert(title, text, level)

    def say(self, text: str) -> None:
        """Print a line above the progress line."""
        self._line.say(text)

    def doing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Show the name of the activity between two steps in the progress line."""
        return self._line.doing(what)

    def flush(self) -> None:
        """Flush metrics.jsonl to the disk, because a checkpoint must not be newer than the record.

        Raises OSError.
        """
        self._file.flush()

    def finish(
        self, exit_code: int, picture: Path | None = None, export: Path | None = None
    ) -> None:
        """End the record. Later calls have no effect.

        `exit_code` sets the run's state in W&B. `picture` and the folder `export` are uploaded to
        W&B. This takes at most about WANDB_FINISH seconds, or WANDB_ARTIFACT seconds with an
        export.
        """
        if self._finished:
            return
        self._finished = True
        self._line.close()
        if self._wandb:
            self._wandb.finish(exit_code, picture, export)
        self._file.close()

    def close(self) -> None:
        """End the record as the record of a failed run, if it has not ended yet."""
        self.finish(1)


@dataclass(frozen=True)
class WandbAlert:
    """An alert for W&B, which sends it by mail or to Slack if the user's settings say so."""

    title: str
    text: str
    level: str  # "WARN" or "ERROR"

    MAX_TITLE = 63  # characters that W&B accepts


class WandbCopy:
    """A copy of the metrics and the alerts in a W&B run.

    A separate thread writes the copy, so that a slow, hung or dead W&B neither delays nor fails a
    step. wandb writes through a child process, wandb-core. A signal to all descendants of a rank
    also ends wandb-core (launch.py sends them SIGTERM). In this case wandb-core is started again
    with the same run id, and all metrics that may not have reached the disk are sent to it again.
    """

    def __init__(self, run: WandbRun, run_dir: Path, say: Say):
        _quiet_wandb(run_dir)
        import wandb  # imported here, not in the thread: one thread imports at a time

        self._wandb = wandb
        self._say = say
        self._stopping = run.stopping
        # None: the run has ended
        self._queue: queue.SimpleQueue[dict[str, Any] | WandbAlert | None] = queue.SimpleQueue()
        # (time, metrics or alert) of the last WANDB_REPEAT seconds
        self._recent: deque[tuple[float, dict[str, Any] | WandbAlert]] = deque()
        self._ended = self._abandoned = False  # no further metrics follow; nobody waits any longer
        self._exit_code = self._step = 0
        self._loss_plot: Path | None = None
        self._export: Path | None = None
        self._finish_timeout = WANDB_ARTIFACT if run.artifact else WANDB_FINISH
        self._run = {
            "id": _wandb_id(run_dir / "wandb_id", say),
            "dir": str(run_dir.resolve()),
            "project": (
                run.project
                if run.project != Recipe.project
                else os.environ.get("WANDB_PROJECT", run.project)
            ),
            "name": os.environ.get("WANDB_NAME", run.name),
            "config": run.config,
            "resume": "allow",
        }
        self._thread = threading.Thread(target=self._copy, name="wandb copy", daemon=True)
        self._thread.start()

    def log(self, metrics: dict[str, Any]) -> None:
        if self._thread.is_alive():
            self._queue.put(dict(metrics))
        self._step = metrics["step"]

    def alert(self, title: str, text: str, level: str) -> None:
        if self._thread.is_alive():
            level = "ERROR" if level == "error" else "WARN"
            self._queue.put(WandbAlert(title[: WandbAlert.MAX_TITLE], text, level))

    def finish(self, exit_code: int, picture: Path | None, export: Path | None) -> None:
        self._exit_code, self._loss_plot, self._export = exit_code, picture, export
        self._queue.put(None)
        self._thread.join((WANDB_ARTIFACT if export else WANDB_FINISH) + 3)
        if self._thread.is_alive():
            self._abandoned = True
            self._say(
                "W&B does not answer, its record may lack the last steps. The file metrics.jsonl is"
                " complete"
            )

    def _copy(self) -> None:
        from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError
        from wandb.sdk.mailbox.mailbox_handle import ServerResponseError

        for attempt in range(WANDB_STARTS):
            try:
                self._record()
                break
            except (
                self._wandb.Error,
                MailboxClosedError,
                HandleAbandonedError,
                ServerResponseError,
                OSError,
            ) as error:
                if self._abandoned:
                    return
                then = (
                    "starting it again"
                    if attempt + 1 < WANDB_STARTS
                    else "given up, and metrics.jsonl continues"
                )
                # During a stop this is not a failure, because launchers end all of a rank's
                # descendants.
                if attempt + 1 == WANDB_STARTS or not self._stopping():
                    self._say(f"W&B stopped recording ({' '.join(str(error).split())}), {then}")
            finally:
                # wandb does this at exit anyway. But at exit a dead wandb-core prints a traceback,
                # and a hung wandb-core hangs the process. AssertionError: the process no longer
                # waits, and its exit calls teardown at the same time.
                with contextlib.suppress(OSError, AssertionError):
                    self._wandb.teardown(self._exit_code)

    def _record(self) -> None:
        run = self._init()
        # Without this, W&B drops the steps that a resumed run repeats.
        run.define_metric("*", step_metric="step")
        # The summary shows the best value instead of the last value.
        run.define_metric("eval_loss", step_metric="step", summary="min")
        for _, entry in self._recent:
            send_to_wandb(entry, run)
        while not self._ended:
            entry = self._queue.get()
            if entry is None:
                self._ended = True
                break
            self._recent.append((time.monotonic(), entry))
            # No error means that wandb-core is alive, so entries older than WANDB_REPEAT are on
            # disk.
            send_to_wandb(entry, run)
            while self._recent[0][0] < self._recent[-1][0] - WANDB_REPEAT:
                self._recent.popleft()
        if self._loss_plot:
            run.log({"step": self._step, "loss.png": self._wandb.Image(str(self._loss_plot))})
        if self._export:
            self._upload(run, self._export)
        run.finish(exit_code=self._exit_code)

    def _upload(self, run: Any, export: Path) -> None:
        """Record the exported model as an artifact of the run."""
        name = re.sub(r"[^\w.-]", "-", f"{self._run['name']}-{self._run['id']}")
        artifact = self._wandb.Artifact(name, type="model", metadata={"step": self._step})
        # add_dir would print to the terminal.
        for file in sorted(path for path in export.rglob("*") if path.is_file()):
            # Do not copy the file on the disk.
            artifact.add_file(str(file), file.relative_to(export).as_posix(), policy="immutable")
        run.log_artifact(artifact)

    def _init(self) -> Any:
        from wandb.sdk.lib import wbauth

        settings = self._wandb.Settings(
            console="off",  # otherwise wandb wraps stdout and stderr
            silent=True,
            save_code=False,
            disable_code=True,
            disable_git=True,  # otherwise wandb uploads the diff of the working tree
            init_timeout=WANDB_INIT,
            finish_timeout=self._finish_timeout,
            x_transaction_log_flush_interval=1.0,  # in seconds, well below WANDB_REPEAT
        )
        host = ""
        try:
            host = self._wandb.setup().settings.base_url
            logged_in = wbauth.authenticate_session(
                host=host, source="recipekit", prompt=False, update_session=False
            )
            mode = None if logged_in or "WANDB_MODE" in os.environ else "offline"
            run = self._wandb.init(**self._run, mode=mode, settings=settings)
        except self._wandb.Error as error:
            self._say(
                f"{_wandb_problem(' '.join(str(error).split()), host)}. The run continues"
                " without W&B"
            )
            self._wandb.teardown()  # the failed attempt still occupies the run's id
            run = self._wandb.init(**self._run, mode="offline", settings=settings)
        if run.offline:
            self._say(
                "W&B records offline. Upload with: wandb sync"
                f" {shlex.quote(str(Path(run.dir).parent))}"
            )
        elif run.url:
            self._say(f"W&B: {run.url}")
        return run


def send_to_wandb(entry: dict[str, Any] | WandbAlert, run: "wandb.Run") -> None:
    """Send the metrics of a step, or an alert, to a W&B run."""
    if isinstance(entry, WandbAlert):
        run.alert(entry.title, entry.text, entry.level)
    else:
        run.log(entry)


def _quiet_wandb(run_dir: Path) -> None:
    """Prevent wandb from printing to the terminal.

    wandb-core prints its log there if HOME cannot be written. It also prints a line for each error
    report about wandb itself that cannot be sent.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    try:
        (home / "wandb" / "logs").mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=home / "wandb" / "logs").close()
    except OSError:
        os.environ.setdefault("WANDB_CACHE_DIR", str(run_dir.resolve() / "wandb" / "cache"))


def _wandb_problem(error: str, host: str) -> str:
    """Return the reason why W&B cannot record the run, and how to fix it."""
    if "No API key" in error:
        return (
            "W&B has no key to log in with: run wandb login, or set WANDB_API_KEY, for the next"
            " start"
        )
    if "error 401" not in error and "not logged in" not in error:
        return f"W&B cannot be reached ({error})"
    mend = (
        "give a valid WANDB_API_KEY"
        if "WANDB_API_KEY" in os.environ
        else f"wandb login --relogin --host {host} takes another"
    )
    return f"W&B refuses the key ({host}, error 401): {mend}, for the next start"


def _json_number(value: object) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _wandb_id(path: Path, say: Say) -> str:
    """Return the run folder's W&B id.

    This is the value of WANDB_RUN_ID, else the id stored in the folder, else a new id.

    The file `path` also records the identity of its folder, because a copy of the folder must not
    write into the original's W&B run. A renamed folder keeps its inode. A folder on a disk that was
    mounted again keeps its path.
    """
    folder = path.parent.resolve()
    inode = str(folder.stat().st_ino)
    kept, where = "", list[str]()
    with contextlib.suppress(OSError, ValueError):
        first, *rest = path.read_text().split("\n")
        if re.fullmatch(r"[^\x00-\x20/\\#?%:]{1,128}", first.strip()):  # ids that W&B accepts
            kept, where = first.strip(), (rest[0] if rest else "").split(" ", 1)
    # older files contain only the id
    copied = len(where) == 2 and inode != where[0] and str(folder) != where[1]
    chosen = os.environ.get("WANDB_RUN_ID", "").strip()
    used = chosen or (kept if not copied else "") or secrets.token_hex(4)
    if kept and chosen and chosen != kept:
        say(
            f"W&B run {chosen}, from WANDB_RUN_ID. Until now this folder was recorded in run {kept}"
        )
    elif kept and used != kept:
        say(
            f"W&B run {used}, because this folder is a copy of {where[1]}. To continue run {kept},"
            f" set WANDB_RUN_ID={kept}"
        )
    if (used, where) != (kept, [inode, str(folder)]):
        write_atomic(path, f"{used}\n{inode} {folder}\n")
    return used
