"""Variables that reach the ranks by ssh, Slurm and Kubernetes.

Slurm means `--where slurm` and `sbatch launch/slurm.sbatch`. No secret may be printed.
"""

import os
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from pool import ROOT
from wandb import env as wandb_env

from launch import environment
from launch.__main__ import main
from launch.slurm import LOGIN

NANO = "recipes/llama_nano_zero2.py"
HIDDEN = "hunter2hunter2"  # the part of each value that must stay secret
# Columns: ssh, --where slurm, slurm.sbatch, Kubernetes. R: reaches the ranks. S: reaches the ranks
# as a secret. L: stays on this machine and is listed by name. -: not in the line of slurm.sbatch.
REACHED = {
    **{
        name: "http://proxy.corp:3128"
        for name in (
            "http_proxy",
            "https_proxy",
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "ALL_PROXY",
            "ftp_proxy",
        )
    },
    **{name: "localhost,.corp,10.0.0.0/8" for name in ("no_proxy", "NO_PROXY")},
    **{
        name: "/etc/corp/ca.pem"
        for name in (
            "SSL_CERT_FILE",
            "SSL_CERT_DIR",
            "REQUESTS_CA_BUNDLE",
            "CURL_CA_BUNDLE",
            "AWS_CA_BUNDLE",
        )
    },
    **{
        name: "https://mirror.corp/a"
        for name in ("HF_ENDPOINT", "WANDB_BASE_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
    },
    **{
        name: "/data/hub"
        for name in (
            "HF_HOME",
            "HF_HUB_CACHE",
            "HF_DATASETS_CACHE",
            "HF_TOKEN_PATH",
            "XDG_CACHE_HOME",
            "HF_XET_CACHE",
        )
    },
    **{
        name: "1"
        for name in (
            "HF_HUB_OFFLINE",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN",
            "HF_HUB_DISABLE_XET",
            "TRANSFORMERS_OFFLINE",
            "HF_DATASETS_OFFLINE",
        )
    },
    **{
        name: "team"
        for name in (
            "WANDB_PROJECT",
            "WANDB_ENTITY",
            "WANDB_RUN_GROUP",
            "WANDB_TAGS",
            "WANDB_NAME",
            "WANDB_MODE",
            "WANDB_JOB_TYPE",
        )
    },
    "WANDB_NOTES": "lr 3e-4, tokens: 2B",
    **{
        name: "1"
        for name in (
            "NCCL_DEBUG",
            "NCCL_IB_GID_INDEX",
            "NCCL_SOCKET_IFNAME",
            "NCCL_IB_HCA",
            "NCCL_P2P_DISABLE",
            "NCCL_NET_GDR_LEVEL",
        )
    },
    **{
        name: "x"
        for name in (
            "AWS_DEFAULT_REGION",
            "AWS_REGION",
            "AWS_PROFILE",
            "AWS_CONFIG_FILE",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
        )
    },
    **{
        name: "1"
        for name in (
            "OMP_NUM_THREADS",
            "TOKENIZERS_PARALLELISM",
            "DS_ACCELERATOR",
            "GLOO_SOCKET_IFNAME",
            "TORCH_DISTRIBUTED_DEBUG",
        )
    },
}
TABLE = {
    **dict.fromkeys(REACHED, "RRRR"),
    **dict.fromkeys(
        ("PYTHONPATH", "LD_LIBRARY_PATH", "TORCH_EXTENSIONS_DIR", "CUDA_HOME", "SCRATCH", "WORK"),
        "RRRL",
    ),
    **dict.fromkeys(
        (
            "HF_TOKEN",
            "WANDB_API_KEY",
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
        ),
        "SL-L",
    ),
    # Addresses with a key or a password.
    **dict.fromkeys(("WANDB_APP_URL", "MLFLOW_TRACKING_URI", "all_proxy"), "SLRL"),
    **dict.fromkeys(
        ("CUDA_VISIBLE_DEVICES", "WANDB_SERVICE", "HF_OIDC_ID_TOKEN", "AWS_BEARER_TOKEN_BEDROCK"),
        "LL-L",
    ),
    "NCCL_OF_NEXT_YEAR": "RR-R",
}
VALUES = {
    **dict.fromkeys(TABLE, "x"),
    **{name: HIDDEN for name, ways in TABLE.items() if ways[1] == "L"},
    **REACHED,
    "WANDB_APP_URL": f"https://wandb.corp/?key={HIDDEN}",
    "MLFLOW_TRACKING_URI": f"https://{HIDDEN}@mlflow.corp",
    "all_proxy": f"http://me:{HIDDEN}@proxy.corp:3128",
}
SBATCH = re.findall(
    r"^#SBATCH --export=(.*)$", (ROOT / "launch" / "slurm.sbatch").read_text(), re.MULTILINE
)[0].split(",")


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables of the table and a login shell's variables, and remove all others."""
    for name in [
        name for name in os.environ if name not in ("PATH", "HOME", "LANG", "PYTEST_CURRENT_TEST")
    ]:
        monkeypatch.delenv(name)
    for name, value in VALUES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)


def names_after(text: str, output: str) -> set[str]:
    """Return the names in the line that begins with `text`."""
    (line,) = [line for line in output.splitlines() if line.startswith(text)]
    return set(re.findall(r"\b[A-Za-z]\w+\b", line.removeprefix(text)))


STAYS = "launch: variables that stay here: "


def ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> list[tuple[set[str], set[str], set[str]]]:
    """Return (exported names, secret names, listed names) for each way to start ranks.

    The ways are ssh, slurm, slurm.sbatch and Kubernetes.
    """
    (tmp_path / "hostfile").write_text("worker-1 slots=2\nworker-2 slots=2\n")
    assert main(["--hostfile", str(tmp_path / "hostfile"), "--dry-run", NANO]) == 0
    ssh = capsys.readouterr().out
    travel = (
        next(line for line in ssh.splitlines() if "that travel with it" in line)
        .partition("stdin: ")[2]
        .split(", ")
    )
    assert main(["--where", "slurm", "--nodes", "2", "--dry-run", NANO]) == 0
    slurm = capsys.readouterr().out
    exported = set(re.search(r"--export=(\S*)", slurm)[1].split(","))
    assert main(["--where", "k8s", "--gpus", "8", "--image", "x", "--dry-run", NANO]) == 0
    manifest = capsys.readouterr()
    (container,) = list(yaml.safe_load_all(manifest.out))[1]["spec"]["template"]["spec"][
        "containers"
    ]
    stated = {variable["name"] for variable in container["env"]}
    assert not [text for text in (ssh, slurm, manifest.out, manifest.err) if HIDDEN in text]
    return [
        (
            {name for name in travel if " " not in name},
            {name.split()[0] for name in travel if " " in name},
            names_after("launch:   " + STAYS[8:], ssh),
        ),
        (exported, set(), names_after(STAYS, slurm)),
        (set(SBATCH), set(), set()),
        (stated, set(), names_after(STAYS, manifest.err)),
    ]


def test_each_variable_reaches_the_ranks_or_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ways(tmp_path, capsys)
    assert len(TABLE) >= 60

    def letters(name, sets):
        return (
            "".join(letter for letter, names in zip("RSL", sets, strict=True) if name in names)
            or "-"
        )

    assert {name: "".join(letters(name, sets) for sets in found) for name in TABLE} == TABLE


def test_sbatch_passes_on_the_known_names_of_each_family() -> None:
    """The names come from the installed packages.

    No name may look like a secret or be missing from the list.
    """
    wrong = [
        name
        for name in SBATCH
        if name not in LOGIN
        and (not environment.is_listed(name) or environment.is_secret(name, "x"))
    ]
    # The name is a switch.
    assert len(SBATCH) == len(set(SBATCH)) and wrong == ["HF_HUB_DISABLE_IMPLICIT_TOKEN"]
    known = {
        value
        for value in vars(wandb_env).values()
        if isinstance(value, str) and value.startswith("WANDB_")
    }
    text = "".join(Path(path).read_text() for path in (constants.__file__, wandb_env.__file__))
    known |= set(re.findall(r"[\"']((?:HF|HUGGINGFACE|WANDB)_[A-Z_0-9]+)[\"']", text))
    internal = {
        name
        for name in known
        if re.search(
            r"_AGENT_|_LAUNCH_|_JUPYTER|_NOTEBOOK|_URL_(HOME|TEMPLATE)$|_OIDC_|_OAUTH_|WANDB_X_|WANDB_GIT_ROOT",
            name,
        )
    }
    internal |= {
        f"WANDB_{name}"
        for name in (
            "ANONYMOUS",
            "ARGS",
            "INITED",
            "MAGIC",
            "RUN_DIR",
            "RUN_STORAGE_ID",
            "SHOW_RUN",
            "CRASH_NOSYNC_TIME",
        )
    }
    internal |= {
        "WANDB_ARTIFACT_FETCH_FILE_URL_BATCH_SIZE",
        "WANDB_ENABLE_DCGM_PROFILING",
        "WANDB_FILE_PUSHER_TIMEOUT",
    }
    assert len(known) > 90
    assert {
        name
        for name in known - internal
        if not environment.is_secret(name, "x") and name not in environment.OF_ONE_HOST
    } <= {*SBATCH}
    assert {*environment.NAMES} <= {*SBATCH}


SECRET_VALUES = [
    *(
        "http://me:pass@proxy:3128",
        "https://TOKEN@mirror",
        "http://me:pa/ss@proxy:1",
        "me:pass@proxy:3128",
        "ssh://me@host",
    ),
    *(
        "https://w/?key=abc",
        "https://w/?a=1&access_token=abc",
        "https://s3/x?X-Amz-Signature=abc",
        "https://blob/x?sv=1&sig=abc",
    ),
    *(
        "AccountName=x;AccountKey=abc==",
        "x-api-key: abc",
        '{"Authorization": "Bearer abc"}',
        f"https://h/hf_{'a' * 30}/x",
    ),
]
PLAIN_VALUES = [
    *(
        "https://hub.corp:443/a@b",
        "http://proxy:3128",
        "localhost,127.0.0.1:80,.corp",
        "mlx5_0:1,mlx5_1:1",
        "/a:/b",
        "=eth0",
    ),
    *(
        "backend:native,expandable_segments:True",
        "arn:aws:iam::1:role/x",
        "lr 3e-4, tokens: 2B",
        "max_tokens=5",
        "https://h/?mode=x",
    ),
]


@pytest.mark.parametrize("value", SECRET_VALUES)
def test_a_key_or_password_in_a_value_is_a_secret(value: str) -> None:
    found = {"HF_ENDPOINT": value}
    assert (
        environment.is_secret("HF_ENDPOINT", value)
        and environment.secrets(found, []) == found
        and not environment.needed(found, [])
    )


@pytest.mark.parametrize("value", PLAIN_VALUES)
def test_a_value_without_one_is_no_secret(value: str) -> None:
    assert environment.needed({"HF_ENDPOINT": value}, []) == {
        "HF_ENDPOINT": value
    } and not environment.secrets({"HF_ENDPOINT": value}, [])


@pytest.mark.parametrize(
    "where", [["--where", "slurm"], ["--where", "k8s", "--gpus", "8", "--image", "x"]]
)
@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--dataset", f"https://h/x?token={HIDDEN}"], "--dataset"),
        ([f"--model=https://me:{HIDDEN}@h/x"], "--model"),
    ],
)
def test_an_address_with_a_key_is_not_submitted(
    capsys: pytest.CaptureFixture[str], where: list[str], words: list[str], flag: str
) -> None:
    """sacct shows a job's command line, and a manifest is a file that others may read."""
    assert main([*where, "--dry-run", NANO, *words]) == 1
    said = capsys.readouterr()
    assert (
        f"{flag}: the address contains a key or a password, and " in said.err
        and HIDDEN not in said.out + said.err
    )
    assert main([*where, "--dry-run", NANO, "--dataset", "https://h/x.jsonl"]) == 0


def test_an_address_with_a_key_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks get the address as typed."""
    words = [
        "--dataset",
        f"https://h/x?token={HIDDEN}",
        f"--model=https://me:{HIDDEN}@h/x",
        "https://h/plain?a=1",
        "a=b",
    ]
    assert main(["--gpus", "1", "--dry-run", NANO, *words]) == 0
    said = capsys.readouterr().out
    assert (
        HIDDEN not in said
        and f"{NANO} --dataset https://... --model=https://... 'https://h/plain?a=1' a=b" in said
    )
