"""Files written in blocks: any order, several threads, failing disks and killed processes.

Memory use is limited.
"""

import errno
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from pool import environment
from recipekit.storage import direct_files, manifest
from recipekit.storage.direct_files import DirectFiles

SMALL = 4096
Part = tuple[str, str, int, int]  # file, name, from byte, to byte


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_files, "WRITE_BLOCK_BYTES", SMALL)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on the disk, and a folder on a file system that may lack direct writes."""
    if request.param == "disk":
        yield tmp_path
        return
    made = Path("/dev/shm") / f"blocks_{os.getpid()}"
    made.mkdir()
    yield made
    for path in made.iterdir():
        path.unlink()
    made.rmdir()


def layout(draw: random.Random, files: int = 3, size: int = 40 * SMALL + 1234) -> list[Part]:
    """Return parts of files with some gaps; a name's parts are in several files."""
    parts = []
    for file in range(files):
        at = 0
        while at < size:
            stop = min(size, at + draw.choice([1, 64, 700, SMALL, 5 * SMALL]))
            if draw.random() < 0.8:
                parts.append((f"file{file}", f"name{draw.randrange(10)}", at, stop))
            at = stop
    return parts


def prepare(
    folder: Path, files: int = 3, size: int = 40 * SMALL + 1234
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Write files of random bytes; return (their current contents, their intended contents)."""
    made = np.random.default_rng(0)
    before = {f"file{number}": made.bytes(size) for number in range(files)}
    for name, content in before.items():
        (folder / name).write_bytes(content)
    return before, {name: made.bytes(size) for name in before}


def extents(parts: list[Part]) -> dict[str, set[tuple[int, int]]]:
    return {
        file: {(start, stop) for own, _, start, stop in parts if own == file} for file, *_ in parts
    }


def pieces(parts: list[Part], draw: random.Random, shuffled: bool) -> list[Part]:
    """Return the parts, split at random."""
    found = []
    for file, name, start, stop in parts:
        cuts = sorted({start, stop, *(draw.randint(start, stop) for _ in range(2))})
        found += [(file, name, low, high) for low, high in itertools.pairwise(cuts)]
    if shuffled:
        draw.shuffle(found)
    return found


@pytest.mark.parametrize(("room", "shuffled"), [(4, True), (4, False), (10_000, True)])
@pytest.mark.parametrize("hashed", [True, False])
def test_parts_in_any_order_by_several_threads(
    folder: Path, room: int, shuffled: bool, hashed: bool
) -> None:
    """Every byte is written to its position, and bytes between the parts stay unchanged.

    A name is reported once all of its bytes can be read from the files. This is also true with room
    for only 4 blocks.
    """
    draw = random.Random(1)
    parts = layout(draw)
    before, after = prepare(folder)
    told: list[str] = []

    def stored(name: str) -> None:
        for file, own, start, stop in parts:
            assert (
                own != name or (folder / file).read_bytes()[start:stop] == after[file][start:stop]
            )
        told.append(name)

    left, lock = (
        {
            name: sum(stop - start for _, own, start, stop in parts if own == name)
            for _, name, _, _ in parts
        },
        threading.Lock(),
    )
    with DirectFiles(folder, extents(parts), room * SMALL, hashed, stored) as files:

        def write(piece: Part) -> None:
            file, name, start, stop = piece
            files.write(file, start, np.frombuffer(after[file][start:stop], np.uint8), name)
            with lock:
                left[name] -= stop - start
                last = not left[name]
            if last:
                files.finish(name)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, pieces(parts, draw, shuffled)))
    assert files.num_buffers <= room + 4, "one more for each thread, where all have one in hand"
    assert sorted(told) == sorted({name for _, name, _, _ in parts})
    for file, content in before.items():
        wanted = bytearray(content)
        for own, _, start, stop in parts:
            if own == file:
                wanted[start:stop] = after[file][start:stop]
        assert (folder / file).read_bytes() == wanted
        facts = manifest.file_entry(folder / file)
        assert files.file_entries[file] == (facts if hashed else {"bytes": facts["bytes"]})


def test_large_blocks_are_hashed_in_order_while_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_files, "WRITE_BLOCK_BYTES", 2**20)
    size = 64 * 2**20 + 5
    (tmp_path / "file0").touch()
    os.truncate(tmp_path / "file0", size)
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    with (
        DirectFiles(tmp_path, {"file0": {(0, size)}}, 2**30, True, lambda name: None) as files,
        ThreadPoolExecutor(4) as pool,
    ):
        list(
            pool.map(
                lambda at: files.write("file0", at, content[at : at + 2**20], "all"),
                range(0, size, 2**20),
            )
        )
    assert files.file_entries["file0"] == manifest.file_entry(tmp_path / "file0")
    assert (tmp_path / "file0").read_bytes() == content.tobytes()


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    """The error must name the file. Earlier parts have been written and reported."""
    prepare(tmp_path, 1)
    told: list[str] = []
    limits, size = resource.getrlimit(resource.RLIMIT_FSIZE), 40 * SMALL
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 * SMALL, limits[1]))
    try:
        with (
            pytest.raises(OSError, match="File too large") as caught,
            DirectFiles(tmp_path, {"file0": {(0, size)}}, 8 * SMALL, True, told.append) as files,
        ):
            for at in range(0, size, SMALL):
                files.write("file0", at, np.full(SMALL, 7, np.uint8), f"{at}")
                files.finish(f"{at}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(tmp_path / "file0")
    assert sorted(told, key=int) == [str(at) for at in range(0, 20 * SMALL, SMALL)]
    assert (tmp_path / "file0").read_bytes()[: 20 * SMALL] == bytes([7]) * 20 * SMALL


def test_an_error_of_the_writer_leaves_what_was_written_in_the_files(tmp_path: Path) -> None:
    before, _ = prepare(tmp_path, 1)
    told: list[str] = []
    with (
        pytest.raises(KeyError, match="of the caller"),
        DirectFiles(tmp_path, {"file0": {(100, 3 * SMALL)}}, 2**20, True, told.append) as files,
    ):
        files.write("file0", 100, np.full(SMALL, 7, np.uint8), "half a block")
        files.finish("half a block")
        assert not told
        raise KeyError("of the caller")
    assert told == ["half a block"]
    content = (tmp_path / "file0").read_bytes()
    assert content[: 100 + SMALL] == before["file0"][:100] + bytes([7]) * SMALL
    assert content[3 * SMALL :] == before["file0"][3 * SMALL :]


def test_an_error_of_stored_is_the_error_of_the_whole(tmp_path: Path) -> None:
    """An error in `stored` is not lost, although it is raised on a thread that is not joined."""
    prepare(tmp_path, 1)

    def stored(name: str) -> None:
        raise OSError(errno.ENOSPC, "journal")

    with (
        pytest.raises(OSError, match="journal"),
        DirectFiles(tmp_path, {"file0": {(0, 40 * SMALL)}}, 4 * SMALL, True, stored) as files,
    ):
        for at in range(0, 40 * SMALL, SMALL):
            files.write("file0", at, np.full(SMALL, 7, np.uint8), f"{at}")
            files.finish(f"{at}")


def test_a_block_that_cannot_be_read_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = prepare(tmp_path, 1)

    def failing(file: direct_files._File, number: int, bits: np.ndarray) -> np.ndarray:
        raise OSError(errno.EIO, "Input/output error", str(file.path))

    monkeypatch.setattr(direct_files, "_read_block", failing)
    with (
        pytest.raises(OSError, match="Input/output error"),
        DirectFiles(tmp_path, {"file0": {(0, 100)}}, 2**20, True, lambda name: None) as files,
    ):
        files.write("file0", 0, np.full(100, 7, np.uint8), "a part of a block")
    assert (tmp_path / "file0").read_bytes() == before["file0"]


DYING = """
import os, signal, sys
import numpy as np
from pathlib import Path
from recipekit.storage import direct_files
direct_files.WRITE_BLOCK_BYTES = 4096
folder = Path(sys.argv[1])
with (folder / "told").open("w") as told:
    def stored(name):
        print(name, file=told, flush=True)
        if name == "9":
            os.kill(os.getpid(), signal.SIGKILL)
    with direct_files.DirectFiles(folder, {"file0": {(0, 40 * 4096)}}, 4096 * 4, True, \
stored) as files:
        for number in range(80):
            files.write("file0", number * 2048, np.full(2048, 7, np.uint8), str(number))
            files.finish(str(number))
"""


def test_what_was_told_survives_a_kill(tmp_path: Path) -> None:
    prepare(tmp_path, 1)
    ended = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path)], env=environment(), timeout=120
    )
    assert ended.returncode == -signal.SIGKILL
    told, content = (tmp_path / "told").read_text().split(), (tmp_path / "file0").read_bytes()
    assert "9" in told and all(
        content[int(number) * 2048 : int(number) * 2048 + 2048] == bytes([7]) * 2048
        for number in told
    )
