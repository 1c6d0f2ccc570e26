"""A small drill: a chain of kills that ends like an unbroken run, and faults to detect."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pool import ROOT, environment

sys.path.insert(0, str(ROOT / "tools" / "drill"))

import drill_checkpoint
from drill_checkpoint import Broken, Chain


def drill(folder: Path, *flags: object, limit: int) -> list[str]:
    """Run the drill; return the cells in its table's last line, without the title."""
    command = [
        sys.executable,
        str(ROOT / "tools" / "drill" / "drill_checkpoint.py"),
        "--folder",
        str(folder),
        *map(str, flags),
    ]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=limit, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return [cell.strip() for cell in done.stdout.splitlines()[-2].strip("|").split("|")][1:]


@pytest.mark.slow
def test_a_chain_of_two_kills_ends_as_the_unbroken_run(
    ops: Callable[[str], None], tmp_path: Path
) -> None:
    kills, inside, *_, verified, equal, _ = drill(
        tmp_path / "drill", "--kills", 2, "--layouts", "zero2", "--seed", 4, limit=400
    )
    assert (kills, equal) == ("2", "1") and int(inside) >= 1 and int(verified) >= 2


@pytest.mark.slow
def test_twelve_kills_over_all_layouts(ops: Callable[[str], None], tmp_path: Path) -> None:
    kills, inside, *_, equal, _ = drill(tmp_path / "drill", "--kills", 12, "--chain", 3, limit=1800)
    assert (kills, equal) == ("12", "4") and int(inside) >= 6


def test_a_recipe_that_is_no_file_is_a_wrong_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        drill_checkpoint.main(["--recipe", str(tmp_path / "none.py")])
    assert (
        ended.value.code == 2
        and f"--recipe {tmp_path / 'none.py'} is no file" in capsys.readouterr().err
    )


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """Return a chain before its first run."""
    return Chain("zero2", 1, tmp_path, random.Random(0))


def test_a_latest_on_nothing_is_broken(chain: Chain) -> None:
    drill_checkpoint.check_latest(chain)
    assert chain.tally == {"before the first checkpoint": 1}
    (chain.run / "checkpoints" / "step_00000001").mkdir(parents=True)
    (chain.run / "checkpoints" / "latest").write_text("step_00000001")
    with pytest.raises(Broken, match=r"manifest\.json is missing"):
        drill_checkpoint.check_latest(chain)


def test_another_loss_is_broken(chain: Chain) -> None:
    for name, loss in (("run", 1.5), ("unbroken", 1.25)):
        (chain.folder / name).mkdir()
        (chain.folder / name / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "loss": loss, "grad_norm": 1.0, "lr": 0.1, "tokens": 8}) + "\n"
        )
    with pytest.raises(Broken, match="differs"):
        drill_checkpoint.check_equal(chain)
