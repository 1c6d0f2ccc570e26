"""Arguments arrive as typed, variables are forwarded, and unsafe hostfiles are rejected."""

import json
import os
import re
import shlex
import socket
import string
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import yaml
from hypothesis import example, given
from job import Job
from pool import ROOT, import_path
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from words import BYTES, NASTY, QUICK, WORD, arbitrary_words, expanded

sys.path.insert(0, str(ROOT))

from launch import cores, environment, hosts, spawn
from launch.__main__ import main
from launch.errors import LaunchError
from launch.host import Agent
from launch.hosts import Host, devices, read_hostfile
from launch.job import Job as LaunchJob
from launch.kubernetes import scalar, unexpanded
from launch.run_folder import out_of


def python_path() -> str:
    return import_path(ROOT, ROOT / "recipes")


DUMP = """
import json, os, sys
json.dump([sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES"), sorted(os.sched_getaffinity(0))], \
open(f"dump_{os.environ['RANK']}.json", "w"))
"""


@pytest.mark.parametrize("spawner", ["deepspeed", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_words_reach_every_rank_as_typed(
    tmp_path: Path, ops: Callable[[str], None], spawner: str
) -> None:
    (tmp_path / "dump.py").write_text(DUMP)
    words = [*arbitrary_words(), BYTES]
    job = Job(
        tmp_path,
        [
            sys.executable,
            "-m",
            "launch",
            "--spawn",
            spawner,
            "--gpus",
            "2",
            "--bind_cores",
            "dump.py",
            *words,
        ],
        PYTHONPATH=python_path(),
    )
    try:
        assert job.wait(120) == 0, job.output[-4000:]
    finally:
        job.close()
    bound = []
    for rank in (0, 1):
        got, visible, own = json.loads((tmp_path / f"dump_{rank}.json").read_text())
        bound.append(own)
        assert got == words
        assert visible is not None and devices({"CUDA_VISIBLE_DEVICES": visible}) == 0, (
            "the tests run with none, which is a wish for the CPU"
        )
    assert sorted({*bound[0], *bound[1]}) == sorted(os.sched_getaffinity(0)) and (
        len(os.sched_getaffinity(0)) < 2 or not set(bound[0]) & set(bound[1])
    )


@QUICK
@given(WORD)
@example(BYTES)
def test_torchrun_gives_back_what_was_typed(word: str) -> None:
    """torchrun substitutes its macros in every argument with string.Template."""
    assert string.Template(spawn.for_torchrun(word)).safe_substitute(local_rank="7") == word


@QUICK
@given(WORD)
def test_a_manifest_gives_back_what_was_typed(word: str) -> None:
    assert expanded(yaml.safe_load(scalar([unexpanded(word)]))[0]) == word


def test_a_manifest_refuses_what_is_no_text() -> None:
    with pytest.raises(LaunchError, match="0xff"):
        scalar([BYTES])


@QUICK
@given(WORD)
def test_nothing_of_the_job_stands_on_the_command_line_of_ssh(word: str) -> None:
    job = LaunchJob(
        (Host("worker-1", 8),),
        "deepspeed",
        ("x.py", word),
        "/usr/bin/python3",
        "/",
        {"HF_TOKEN": word},
        where="hostfile",
    )
    argv = job.connection(job.hosts[0])
    assert argv[-3:-1] == ["--", "worker-1"]
    assert shlex.split(argv[-1]) == [
        "cd",
        str(ROOT),
        "&&",
        "exec",
        "/usr/bin/python3",
        "-m",
        "launch.host",
    ]
    assert job.specification(0, Path("logs"))["words"] == ("x.py", word)
    assert "HF_TOKEN" not in repr(job)


GOOD = """
# the cluster
worker-1 slots=8   # the first
10.0.0.2 slots=4
fe80::1 slots=1
"""


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text(GOOD)
    assert read_hostfile(tmp_path / "hostfile") == [
        Host("worker-1", 8),
        Host("10.0.0.2", 4),
        Host("fe80::1", 1),
    ]
    assert read_hostfile(tmp_path / "hostfile", 2, 3)[:2] == [
        Host("worker-1", 3),
        Host("10.0.0.2", 3),
    ]
    assert read_hostfile(ROOT / "launch" / "hostfile.example") == [
        Host("worker-1", 8),
        Host("worker-2", 8),
    ]


TWO = "worker-1 slots=8\r\nworker-2 slots=4\r\n"
MARKED = {
    "Notepad": TWO.encode("utf-8-sig"),
    "PowerShell": b"\xff\xfe" + TWO.encode("utf-16-le"),
    "UTF-16, big-endian": b"\xfe\xff" + TWO.encode("utf-16-be"),
    "two files joined": b"\xef\xbb\xbfworker-1 slots=8\n\xef\xbb\xbfworker-2 slots=4\n",
    "no mark": TWO.encode(),
}


@pytest.mark.parametrize("writer", MARKED)
def test_a_byte_order_mark_is_no_part_of_a_host_name(tmp_path: Path, writer: str) -> None:
    (tmp_path / "hostfile").write_bytes(MARKED[writer])
    assert read_hostfile(tmp_path / "hostfile") == [Host("worker-1", 8), Host("worker-2", 4)]


VISIBLE = [
    ("", []),
    ("-1", []),
    ("NoDevFiles", []),
    ("none", []),
    ("void", []),
    ("0, 3", ["0", "3"]),
    ("1,-1,2", ["1"]),
    ("0,none", ["0"]),
    (
        "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,MIG-4ab1",
        ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-4ab1"],
    ),
    ("MIG-GPU-8932f937/1/0", ["MIG-GPU-8932f937/1/0"]),
]


@pytest.mark.parametrize(("listed", "expected"), VISIBLE)
def test_devices_end_at_the_first_word_that_is_no_device(listed: str, expected: list[str]) -> None:
    assert hosts.visible_devices(listed) == expected and devices(
        {"CUDA_VISIBLE_DEVICES": listed}
    ) == len(expected)


BAD = [
    ("-oProxyCommand=id slots=1", "is not a host name or an address"),
    ("-l slots=1", "is not a host name or an address"),
    ("a;reboot slots=1", "is not a host name or an address"),
    ("$(id) slots=1", "is not a host name or an address"),
    ("`id` slots=1", "is not a host name or an address"),
    ("a|b slots=1", "is not a host name or an address"),
    ("a\x0bb slots=1", "must have the form NAME slots=NUMBER"),
    ("a\u2028-b slots=1", "must have the form NAME slots=NUMBER"),
    ("worker-é slots=1", "is not a host name or an address"),
    ("root@worker-3 slots=1", "is not a host name or an address"),
    ("worker-\nslots=1", "is not a host name or an address"),
    ("[fd00::1] slots=1", "without brackets, zone and port, for example: fd00::1 slots=8"),
    ("fe80::1%eth0 slots=1", "without brackets, zone and port"),
    ("1::2::3 slots=1", "is not an IPv6 address"),
    ("10.0.0.1:22 slots=1", "is not an IPv6 address"),
    ("worker-3", "must have the form NAME slots=NUMBER"),
    ("worker-3 slots=0", "must have the form NAME slots=NUMBER"),
    ("worker-3 slots=8 trailing; rm", "must have the form NAME slots=NUMBER"),
    ("worker-3 slots=8x", "must have the form NAME slots=NUMBER"),
    ("worker-3 slots=８", "must have the form NAME slots=NUMBER"),
    ("worker-3 slots=-1", "must have the form NAME slots=NUMBER"),
    ("WORKER-1 slots=1", "is already on line 2"),
    ("worker-1 slots=4", "is already on line 2"),
    ("fd00::9 slots=1\nFD00:0::9 slots=1", "is already on line 3"),
]


@pytest.mark.parametrize(("line", "rule"), BAD, ids=[repr(line) for line, _ in BAD])
def test_a_wrong_line_is_refused_with_its_number(
    tmp_path: Path, line: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hostfile").write_text(f"# first\nworker-1 slots=8\n{line}\nfd00::2 slots=8\n")
    assert (
        main(
            [
                "--hostfile",
                str(tmp_path / "hostfile"),
                "--dry-run",
                str(ROOT / "recipes" / "llama_nano_zero2.py"),
            ]
        )
        == 1
    )
    told = capsys.readouterr().err
    assert f"line {3 + line.count(' slots=1' + chr(10))}: " in told and rule in told, told


def test_all_wrong_lines_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("".join(f"{line}\n" for line, _ in BAD[:6]))
    with pytest.raises(LaunchError) as refused:
        read_hostfile(tmp_path / "hostfile")
    assert [problem.split("line ")[1][0] for problem in refused.value.problems] == list("123456")


VARIABLES = {
    "needed": (
        "WANDB_PROJECT",
        "WANDB_MODE",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "NCCL_DEBUG",
        "PYTHONPATH",
        "OMP_NUM_THREADS",
        "TORCH_EXTENSIONS_DIR",
        "HF_TOKEN_PATH",
    ),
    "secret": ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"),
    "neither": (
        "PATH",
        "DISPLAY",
        "SSH_AUTH_SOCK",
        "CUDA_VISIBLE_DEVICES",
        "GITHUB_TOKEN",
        "WANDB_SOME_SECRET",
        "MLFLOW_TRACKING_PASSWORD",
        "HF_API_KEY",
        "DB_PASSWORD",
    ),
}


def environment_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
    slots: tuple[int, ...],
    bind_cores: bool = False,
    first: str = "127.0.0.1",
    others: Sequence[str] = (),
    **own: str,
) -> dict[str, str]:
    """Return the variables with which an agent starts the first host's ranks.

    `first` is the first host's address, and `own` contains the user's variables.
    """
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    agent = Agent()
    agent.spec = {
        "environment": own,
        "mark": "m",
        "logs": ".",
        "python": sys.executable,
        "spawn": "deepspeed",
        "bind_cores": bind_cores,
        "others": others,
        "for_rank_0": {},
    }
    return agent.environment(
        spawn.Meeting(slots, 0, first, 29500), "folder", [str(number) for number in range(slots[0])]
    )


def outward(family: socket.AddressFamily = socket.AF_INET) -> tuple[str, str]:
    """Return a network interface of this host that other hosts may reach, and its address."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == family and not address.address.startswith(
                ("127.", "::1", "fe80:")
            ):
                return name, address.address
    pytest.skip("this machine has no interface but loopback")


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_an_interface_is_named_between_hosts_only_and_for_gloo_and_nccl(
    monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily
) -> None:
    names, (name, address) = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), outward(family)
    for slots, own, expected in (
        ((2, 2), {}, [name, f"={name}"]),
        ((2, 2), {"NCCL_SOCKET_IFNAME": "ib0"}, [name, "ib0"]),
        ((2, 2), {"GLOO_SOCKET_IFNAME": "eth1"}, ["eth1", f"={name}"]),
        ((2,), {}, [None, None]),
    ):
        found = environment_of_a_host(monkeypatch, slots, first=address, **own)
        assert [found.get(variable) for variable in names] == expected


def test_loopback_is_never_named_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts can map the first host's name to 127.0.1.1 on that host.

    The address of the interface towards the other hosts is used instead.
    """
    name, address = outward()
    for others, first, expected in (
        ((address,), "127.0.1.1", [name, f"={name}"]),
        ((), "127.0.1.1", [None, None]),
        ((), "::1", [None, None]),
    ):
        found = environment_of_a_host(monkeypatch, (2, 2), first=first, others=others)
        assert [
            found.get(variable) for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        ] == expected


def test_threads_and_cores_are_dealt_to_the_ranks_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7, 8})
    monkeypatch.setattr(cores, "cpu_limit", lambda: float("inf"))
    whole = environment_of_a_host(monkeypatch, (2,))
    assert (
        whole["OMP_NUM_THREADS"] == "2"
        and not {"LAUNCH_CORES", "CUDA_DEVICE_ORDER"} & whole.keys() - os.environ.keys()
    )
    bound = environment_of_a_host(monkeypatch, (2,), bind_cores=True)
    assert (bound["OMP_NUM_THREADS"], bound["CUDA_DEVICE_ORDER"]) == ("2", "PCI_BUS_ID")
    first, second = (set(map(int, own.split(","))) for own in bound["LAUNCH_CORES"].split(";"))
    assert first | second == {4, 5, 6, 7, 8} and {len(first), len(second)} == {2, 3}
    assert (
        environment_of_a_host(monkeypatch, (2,), bind_cores=True, OMP_NUM_THREADS="7")[
            "OMP_NUM_THREADS"
        ]
        == "7"
    )


@pytest.mark.parametrize(
    ("limit", "ranks", "threads"), [(4.0, 2, "2"), (1.5, 1, "1"), (0.2, 2, "1"), (64.0, 1, "5")]
)
def test_a_cpu_limit_is_dealt_to_the_ranks_of_a_host(
    monkeypatch: pytest.MonkeyPatch, limit: float, ranks: int, threads: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7, 8})
    monkeypatch.setattr(cores, "cpu_limit", lambda: limit)
    for bind_cores in (False, True):
        assert (
            environment_of_a_host(monkeypatch, (ranks,), bind_cores)["OMP_NUM_THREADS"] == threads
        )


def two_nodes(folder: Path, nodes: list[int]) -> Path:
    """Write the /sys folder of a host whose GPUs are on these NUMA nodes, in the order of their
    addresses.

    The host has two nodes, each with 4 cores of 2 threads: 0-3 and 8-11, 4-7 and 12-15.
    """
    for number, node in enumerate(nodes):
        device = folder / f"bus/pci/drivers/nvidia/0000:{16 * number:02x}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    (folder / "bus/pci/drivers/nvidia/module").mkdir()  # not a device
    for node, listed in enumerate(("0-3,8-11", "4-7,12-15")):
        (folder / f"devices/system/node/node{node}").mkdir(parents=True)
        (folder / f"devices/system/node/node{node}/cpulist").write_text(f"{listed}\n")
    for core in range(16):
        (folder / f"devices/system/cpu/cpu{core}/topology").mkdir(parents=True)
        (folder / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").write_text(
            f"{core % 8},{core % 8 + 8}\n"
        )
    return folder


ALL = range(16)


@pytest.mark.parametrize(
    ("nodes", "visible", "allowed", "expected"),
    [
        ([1, 0], ["0", "1"], ALL, [[4, 5, 6, 7, 12, 13, 14, 15], [0, 1, 2, 3, 8, 9, 10, 11]]),
        (
            [0, 0, 1, 1],
            ["0", "1", "2", "3"],
            ALL,
            [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]],
        ),
        ([0, 0, 1, 1], ["3", "1"], ALL, [[4, 5, 6, 7, 12, 13, 14, 15], [0, 1, 2, 3, 8, 9, 10, 11]]),
        ([0, 1], ["0", "1"], range(8), [[0, 1, 2, 3], [4, 5, 6, 7]]),  # for example in a container
        ([0, 1], ["0", "1"], range(4), [[0, 1], [2, 3]]),  # node 1 is not allowed at all
        ([-1, -1], ["0", "1"], range(4), [[0, 1], [2, 3]]),
        ([], ["0", "1"], range(4), [[0, 1], [2, 3]]),  # a host without GPUs
        ([0, 1], ["GPU-4f2c", "MIG-1"], range(4), [[0, 1], [2, 3]]),
        ([-1, -1, -1], ["0", "1", "2"], range(2), [[0], [0], [1]]),
    ],
    ids=str,
)
def test_each_rank_gets_cores_beside_its_gpu(
    tmp_path: Path, nodes: list[int], visible: list[str], allowed: range, expected: list[list[int]]
) -> None:
    (tmp_path / "bus/pci/drivers/nvidia").mkdir(parents=True)
    assert cores.deal(visible, allowed, len(nodes), two_nodes(tmp_path, nodes)) == expected


def test_gpus_that_a_container_numbers_anew_are_not_looked_up(tmp_path: Path) -> None:
    """The container numbers the last two of four GPUs as 0 and 1, but /sys shows all GPUs."""
    system = two_nodes(tmp_path, [0, 0, 1, 1])
    # None of the allowed cores is on the NUMA node of the first two GPUs.
    assert cores.deal(["0", "1"], {4, 5, 6, 7}, 4, system) == [[4, 5], [6, 7]]
    assert cores.deal(["0", "1"], ALL, 2, system) == [
        [0, 1, 2, 3, 8, 9, 10, 11],
        [4, 5, 6, 7, 12, 13, 14, 15],
    ]


def test_what_travels_and_what_is_a_secret() -> None:
    variables = {name: f"value of {name}" for names in VARIABLES.values() for name in names}
    assert sorted(environment.needed(variables, [])) == sorted(VARIABLES["needed"])
    assert sorted(environment.secrets(variables, [])) == sorted(VARIABLES["secret"])
    assert "DISPLAY" in environment.needed(variables, ["DISPLAY"])
    assert "GITHUB_TOKEN" in environment.secrets(
        variables, ["GITHUB_TOKEN"]
    ) and "GITHUB_TOKEN" not in environment.needed(variables, ["GITHUB_TOKEN"])


HIDDEN = [
    "HF_TOKEN_WRITE",
    "HUGGINGFACE_TOKEN_RW",
    "WANDB_KEY2",
    "WANDB_API_KEY_OLD",
    "HF_SECRETS",
    "MLFLOW_PASSWORD1",
    "HF_AUTH_BEARER",
]
SHOWN = [
    "TOKENIZERS_PARALLELISM",
    "HF_TOKEN_PATH",
    "HF_HUB_OFFLINE",
    "NCCL_KEYED",
    "TORCH_NCCL_BLOCKING_WAIT",
]


def test_what_looks_like_a_secret_is_none_to_be_shown() -> None:
    variables = {name: "x" for name in [*HIDDEN, *SHOWN]}
    variables |= {
        "MLFLOW_TRACKING_URI": "https://me:pass@mlflow.example",
        "HF_ENDPOINT": "https://hub.example:443/a@b",
        "WANDB_BASE_URL": "https://w.example",
    }
    assert sorted(environment.needed(variables, [])) == sorted(
        [*SHOWN, "HF_ENDPOINT", "WANDB_BASE_URL"]
    )
    assert "MLFLOW_TRACKING_URI" in environment.secrets(variables, ["MLFLOW_TRACKING_URI"])
    assert "MLFLOW_TRACKING_URI" not in environment.needed(variables, ["MLFLOW_TRACKING_URI"])


@pytest.mark.parametrize(
    ("words", "out"),
    [
        ((), "runs/x"),
        (("--tiny", "--steps", "3"), "runs/x_tiny"),
        (("--out", "a"), "a"),
        (("--tiny", "--out", "a"), "a"),
        (("--out=a b",), "a b"),
        (("--out", "a", "--out", "b"), "b"),
    ],
)
def test_the_run_folder_is_that_of_the_recipe(words: tuple[str, ...], out: str) -> None:
    assert (
        out_of(("recipes/x.py", *words))
        == Path(out)
        == parse(Recipe(), Path("recipes/x.py"), list(words)).out
    )


OUTS = [
    ('RECIPE = Recipe(model="a", out="elsewhere/x")', (), "elsewhere/x"),
    ('RECIPE = recipekit.Recipe(out="elsewhere/x")', ("--out", "typed"), "typed"),
    ('RECIPE = Recipe(out="")', (), "runs/x"),
    ("RECIPE = Recipe(", (), "runs/x"),
]


@pytest.mark.parametrize(("text", "words", "out"), OUTS)
def test_the_run_folder_may_stand_in_the_recipe(
    tmp_path: Path, text: str, words: tuple[str, ...], out: str
) -> None:
    (tmp_path / "x.py").write_text(text)
    assert out_of((str(tmp_path / "x.py"), *words)) == Path(out)


def test_the_run_folder_that_is_read_is_the_recipe_s_own(tmp_path: Path) -> None:
    """launch reads the file without running it."""
    (tmp_path / "mine.py").write_text(
        (ROOT / "recipes" / "llama_nano_zero2.py")
        .read_text()
        .replace("Recipe(\n", 'Recipe(\n    out="kept/here",\n', 1)
    )
    show = [sys.executable, "-c", "import mine; print(mine.RECIPE.out)"]
    said = subprocess.run(
        show,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert out_of((str(tmp_path / "mine.py"),)) == Path(said.strip()) == Path("kept/here")


NANO = "recipes/llama_nano_zero2.py"
SLURM, K8S = ["--where", "slurm"], ["--where", "k8s", "--gpus", "8", "--image", "x"]
USAGE = [
    ([], 2, "the recipe is missing"),
    (["--gpus", "none", "x.py"], 2, "is not a number"),
    (["--max_restarts", "-1", "x.py"], 2, "must be 0 or more"),
    (
        ["--tinny", "x.py"],
        2,
        "--tinny: is not a flag of launch. Write the flags of the recipe after its file",
    ),
    (
        ["--steps", "3", "x.py"],
        2,
        "--steps: is not a flag of launch. Write the flags of the recipe after its file",
    ),
    (
        ["--lora_r=8", "x.py"],
        2,
        "--lora_r=8: is not a flag of launch. Write the flags of the recipe after its file",
    ),
    (
        ["--model", "m", "x.py"],
        2,
        "--model: is not a flag of launch. Write the flags of the recipe after its file",
    ),
    (
        ["--hostfil", "hf", "x.py"],
        2,
        "--hostfil: is not a flag of launch. Did you mean --hostfile?",
    ),
    (
        ["--dry-rnu", "--max-restart=3", "x.py"],
        2,
        (
            "Did you mean --dry-run?\n--max-restart=3: is not a flag of launch. Did you mean"
            " --max-restarts?"
        ),
    ),
    (["missing.py"], 1, "missing.py: the file does not exist. Give the path of a recipe"),
    (
        ["recipes/llama_nano_zero3.py", "--tiny"],
        1,
        (
            "recipes/llama_nano_zero3.py: the file does not exist. Did you mean"
            " recipes/llama_nano_zero2.py?"
        ),
    ),
    ([""], 1, "Give the path of a recipe"),
    (["."], 1, "Give the path of a recipe"),
    (
        ["lama_nano_zero2"],
        1,
        "lama_nano_zero2: the file does not exist. Did you mean recipes/llama_nano_zero2.py?",
    ),
    (["--nodes", "2", "recipes/llama_nano_zero2.py"], 1, "Name them with --hostfile"),
    (["--where", "hostfile", "recipes/llama_nano_zero2.py"], 1, "Name it with --hostfile FILE"),
    (["--where", "k8s", "recipes/llama_nano_zero2.py"], 1, "requires an image"),
    (["--env", "NOT_SET_ANYWHERE", "recipes/llama_nano_zero2.py"], 1, "Export it first"),
    (
        [*SLURM, "--env", "NOT_SET_ANYWHERE", NANO],
        1,
        "--env NOT_SET_ANYWHERE: is not set. Export it first",
    ),
    (
        [*SLURM, "--env", "MY_TOKEN", NANO],
        1,
        (
            "--env MY_TOKEN: is a secret, and Slurm stores exported variables in files. Leave it"
            " out, and log in once"
        ),
    ),
    ([*K8S, "--env", "NOT_SET_ANYWHERE", NANO], 1, "Export it first"),
    (
        [*K8S, "--env", "MY_TOKEN", NANO],
        1,
        "kubectl create secret generic NAME-secrets --from-file=MY_TOKEN=FILE",
    ),
    (
        [*K8S, "--python", "/usr/bin/python3", NANO],
        1,
        "--python: is not read with --where k8s, only with local and hostfile and slurm",
    ),
    ([*K8S, "--master_addr", "10.0.0.1", NANO], 1, "--master_addr: is not read with --where k8s"),
    (
        ["--image", "x", "--sbatch=--time=1", NANO],
        1,
        "--image: is not read with --where local, only with k8s",
    ),
    (
        ["--max_restarts", "2", "--once", NANO],
        1,
        "--max_restarts 2: cannot be combined with a program that runs once",
    ),
    (
        [*SLURM, "--wait_hosts", "60", NANO],
        1,
        "--wait_hosts 60: only a restart waits for hosts. Add --max_restarts N",
    ),
    (
        ["--wait_hosts", "60", "--max_restarts", "2", NANO],
        1,
        "--wait_hosts: is not read with --where local, only with hostfile and slurm",
    ),
    (
        [*K8S, "--wait_hosts", "60", "--max_restarts", "2", NANO],
        1,
        "--wait_hosts: is not read with --where k8s",
    ),
    (["--wait_hosts", "0", NANO], 2, "'0' is not a number of at least 1"),
    (["--doctor", "--quick", "--dry-run"], 1, "--dry-run: must come before --doctor"),
]


@pytest.mark.parametrize(
    ("words", "code", "told"), USAGE, ids=[" ".join(words) for words, *_ in USAGE]
)
def test_a_wrong_command_is_refused(words: list[str], code: int, told: str) -> None:
    variables = os.environ | {"MY_TOKEN": "fake"}
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert told in done.stderr and "Traceback" not in done.stderr


def launch(folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    """Return a launch's exit code and all of its output."""
    variables = os.environ | {"PYTHONPATH": import_path(ROOT)} | variables
    argv = [sys.executable, "-m", "launch", *words]
    done = subprocess.run(
        argv,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


CANNOT = [
    (
        ["--python", "/nowhere/python", "x.py"],
        {},
        "/nowhere/python cannot be started: No such file or directory. ",
    ),
    (["--python", "/tmp", "x.py"], {}, "/tmp cannot be started: Permission denied. "),
    (
        ["--hostfile", "hostfile", "--python", sys.executable, "x.py"],
        {"PATH": "/nowhere"},
        "ssh cannot be started: No such file or directory. ",
    ),
    (
        ["x.py", "--out", "/proc/x/y"],
        {},
        (
            "/proc/x/y.logs cannot be created: No such file or directory. Choose another run folder"
            " with --out"
        ),
    ),
    (
        ["x.py"],
        {},
        "runs/x.logs cannot be created: Not a directory. Choose another run folder with --out",
    ),
    (
        ["x.py"],
        {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        "srun: has started launch 2 times. Start launch without srun",
    ),
    (
        ["x.py"],
        {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"},
        "mpirun: has started launch 4 times. Start launch without mpirun",
    ),
    (["--once", "x.py"], {}, "runs/x.logs cannot be created: Not a directory. "),
]


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    CANNOT,
    ids=[" ".join([*words, *variables]) for words, variables, _ in CANNOT],
)
def test_what_cannot_be_started_is_refused(
    tmp_path: Path, words: list[str], variables: dict[str, str], told: str
) -> None:
    (tmp_path / "x.py").write_text("")
    (tmp_path / "hostfile").write_text("worker-1 slots=1\n")
    if "x.logs" in told:
        (tmp_path / "runs").write_text("a file")
    code, said = launch(tmp_path, *words, **variables)
    assert code == 1 and "refused: 1 problem" in said and told in said, said


@pytest.mark.parametrize("spawner", ["deepspeed", "torchrun"])
def test_a_taken_port_is_refused_before_a_rank_starts(tmp_path: Path, spawner: str) -> None:
    """torchrun would fail with a traceback after a minute. MASTER_PORT has no influence."""
    (tmp_path / "x.py").write_text("raise SystemExit(3)")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("--spawn", spawner, "--master_port", str(port), "x.py")
        code, said = launch(tmp_path, *words, MASTER_PORT=str(port + 1))
    assert code == 1 and "refused: 1 problem" in said, said
    found = re.search(
        rf"localhost: master port {port}: is in use\. Choose another: --master_port (\d+)$",
        said,
        re.M,
    )
    assert found and found[1] != str(port), said


def test_one_rank_that_nobody_asked_for_is_told(tmp_path: Path) -> None:
    """The machine has no GPUs."""
    (tmp_path / "x.py").write_text("")
    usable = cores.usable_cores()
    hint = (
        f"launch: 1 rank on {usable} cores, and no GPU: python -m launch --gpus {usable} x.py"
        f" starts {usable} ranks"
    )
    for words, told in (
        (["x.py"], usable > 1),
        (["--gpus", "1", "x.py"], False),
        (["--once", "x.py"], False),
    ):
        code, said = launch(tmp_path, "--dry-run", *words, CUDA_VISIBLE_DEVICES="")
        assert code == 0 and (hint in said) == told, said


@pytest.mark.parametrize("name", ["random.py", "tempfile.py", "json/__init__.py"])
def test_a_file_of_the_current_folder_hides_no_library_from_launch(
    tmp_path: Path, name: str
) -> None:
    """The rank checks the recipe's folder and names the file."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise RuntimeError('the wrong module')\n")
    code, said = launch(tmp_path, "--dry-run", str(ROOT / "recipes" / "llama_nano_zero2.py"))
    assert (
        code == 0
        and "Traceback" not in said
        and f"{sys.executable} -u -P -m deepspeed.launcher.launch " in said
    ), said


def test_a_slurm_that_does_not_answer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(hosts, "ANSWER", 0.5, raising=False)
    with pytest.raises(
        LaunchError, match=r"scontrol show hostnames n\[1-2\] did not answer in 0.5 s"
    ):
        hosts.slurm_hosts({"SLURM_JOB_NODELIST": "n[1-2]"}, None)


def test_dry_run_prints_the_command_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("worker-1 slots=2\nworker-2 slots=2\n")
    words = [
        "--hostfile",
        str(tmp_path / "hostfile"),
        "--spawn",
        "torchrun",
        "--dry-run",
        str(ROOT / "recipes" / "llama_nano_zero2.py"),
        *NASTY,
    ]
    variables = os.environ | {
        "HF_TOKEN": "hf_fake",
        "WANDB_PROJECT": "mine",
        "PYTHONPATH": python_path(),
    }
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (
        "2 hosts, 4 ranks, forked by torchrun" in done.stdout
        and "--nnodes=2 --node-rank=1 --nproc-per-node=2" in done.stdout
    )
    assert (
        "HF_TOKEN (secret)" in done.stdout
        and "WANDB_PROJECT" in done.stdout
        and "hf_fake" not in done.stdout
    )
    assert [path.name for path in tmp_path.iterdir()] == ["hostfile"]
