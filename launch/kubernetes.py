"""The Kubernetes manifest of an Indexed Job, and the search for other pods from inside a pod."""

import argparse
import json
import posixpath
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

from . import environment, run_folder
from .connection import REPOSITORY
from .errors import START_AGAIN, LaunchError
from .hosts import Host, devices

TEMPLATE = Path(__file__).with_name("k8s.yaml")
FOLDER = "/opt/recipes"
PORT = 29500
# Variables of this machine. The image contains its own Python and libraries, and it does not
# contain this machine's folders.
OF_HERE = ("PYTHON", "LD_", "CUDA_", "TORCH_EXTENSIONS_DIR", "SCRATCH", "WORK")
# The same for all pods of a Job, and different for each Job. It replaces {job_id} in `--out
# runs/{job_id}`.
JOB_ID = {
    "name": "LAUNCH_JOB_ID",
    "valueFrom": {
        "fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}
    },
}
# Seconds between a pod's SIGTERM and its end, for the step in progress and the checkpoint.
GRACE = 600
WAIT = 600.0  # seconds within which the first pod must have an address


def add_flags(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="FLAG",
        help=(
            "Slurm: flag to pass to sbatch, for example --sbatch=--partition=NAME. You may"
            " repeat it."
        ),
    )
    parser.add_argument(
        "--image",
        default="",
        metavar="IMAGE",
        help="Kubernetes: container image that contains this repository at --folder.",
    )
    parser.add_argument(
        "--folder",
        default="",
        metavar="PATH",
        help=f"Kubernetes: path of the repository in the image. (default: {FOLDER})",
    )
    parser.add_argument(
        "--claim",
        default="",
        metavar="NAME",
        help=(
            "Kubernetes: PersistentVolumeClaim mounted at FOLDER/runs in all pods. (default: runs)"
        ),
    )
    parser.add_argument(
        "--name",
        default="",
        metavar="NAME",
        help="Kubernetes: name of the Job. (default: the recipe's name)",
    )


def render(arguments: argparse.Namespace, words: tuple[str, ...], variables: dict[str, str]) -> int:
    """Print the manifest or pass it to kubectl. Raises `LaunchError` for an invalid request."""
    text = manifest(arguments, words, variables)
    way = (
        "put it into the job's Secret, kubectl create secret generic"
        f" {job_name(arguments, words)}-secrets --from-file=NAME=FILE"
    )
    for line in environment.left_behind(variables, passed_on(arguments, variables), way):
        print(f"launch: {line}", file=sys.stderr, flush=True)
    if arguments.dry_run:
        print(text, end="")
        return 0
    print("launch: kubectl apply -f - <<'END'\n" + text + "END", flush=True)
    try:
        return subprocess.run(
            ["kubectl", "apply", "-f", "-"], input=text, text=True, check=False
        ).returncode
    except FileNotFoundError:
        raise LaunchError(
            "--where k8s: kubectl is not on PATH. Add --dry-run, and apply the printed manifest on"
            " a machine that has kubectl"
        ) from None


def manifest(
    arguments: argparse.Namespace, words: tuple[str, ...], variables: dict[str, str]
) -> str:
    """Return the Service and the Indexed Job as YAML.

    Raises `LaunchError` for an invalid request.
    """
    name, folder = job_name(arguments, words), arguments.folder or FOLDER
    nodes, runs = arguments.nodes or 1, posixpath.join(folder, "runs")
    if problems := check_manifest(arguments, words, name, folder):
        raise LaunchError(*problems)

    words = (in_image(words[0], folder), *words[1:])
    passed = passed_on(arguments, variables) | {
        "MASTER_ADDR": f"{name}-0.{name}",
        "MASTER_PORT": str(arguments.master_port or PORT),
    }
    passed["LAUNCH_GRACE"] = str(GRACE)
    fields = {
        "name": name,
        "nodes": nodes,
        "grace": GRACE,
        "backoff": nodes * (arguments.max_restarts + 1),
        "image": arguments.image,
        "folder": folder,
        "command": [unexpanded(word) for word in command_in_pod(arguments, words)],
        "env": (
            [{"name": key, "value": unexpanded(value)} for key, value in passed.items()] + [JOB_ID]
        ),
        "secret": f"{name}-secrets",
        "resources": {"limits": {"nvidia.com/gpu": arguments.gpus}},
        "runs": runs,
        "claim": arguments.claim or "runs",
    }
    return re.sub(r"\{(\w+)\}", lambda field: scalar(fields[field[1]]), TEMPLATE.read_text())


def check_manifest(
    arguments: argparse.Namespace, words: tuple[str, ...], name: str, folder: str
) -> list[str]:
    """Return the errors in the request for a manifest.

    An error is an invalid Kubernetes name, a missing image or number of GPUs, or a run folder that
    would be lost.
    """
    problems: list[str] = []
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", name):
        problems.append(
            f"--name {name}: is not a Kubernetes name. Use up to 52 lower-case letters, digits and"
            " hyphens, the first a letter"
        )
    if not arguments.image:
        problems.append(
            "--where k8s: requires an image. Give --image REGISTRY/IMAGE:TAG, with this repository"
            " and its environment in it"
        )
    elif not arguments.gpus:
        problems.append("--where k8s: requires the number of GPUs in a pod. Give --gpus N")
    if not (arguments.once or arguments.doctor):
        problems += check_out(words, folder, posixpath.join(folder, "runs"))
    return problems


def command_in_pod(arguments: argparse.Namespace, words: tuple[str, ...]) -> list[str]:
    """Return the command for each pod: launch again, which starts the pod's own part."""
    own = [
        "--where",
        "k8s",
        "--nodes",
        str(arguments.nodes or 1),
        "--gpus",
        str(arguments.gpus),
        "--spawn",
        arguments.spawn,
        "--max_restarts",
        str(arguments.max_restarts),
    ]
    own += ["--bind_cores"] if arguments.bind_cores else []
    rest = (
        ["--doctor", *words[1:]]
        if arguments.doctor
        else ["--once", *words]
        if arguments.once
        else list(words)
    )
    return ["python", "-m", "launch", *own, *rest]


def job_name(arguments: argparse.Namespace, words: tuple[str, ...]) -> str:
    return arguments.name or re.sub(r"[^a-z0-9]+", "-", Path(words[0]).stem.lower()).strip("-")


def passed_on(arguments: argparse.Namespace, variables: dict[str, str]) -> dict[str, str]:
    """Select the variables that the manifest contains."""
    found = environment.needed(variables, arguments.env)
    return {
        name: value
        for name, value in found.items()
        if name in arguments.env or not name.startswith(OF_HERE)
    }


def check_out(words: tuple[str, ...], folder: str, runs: str) -> list[str]:
    """Return an error for a run folder outside the mounted claim.

    Such a folder would be lost together with the pod.
    """
    text = run_folder.stated_out(words)
    fix = "Use --out runs/NAME"
    if text is None:
        return [
            f"--where k8s: the recipe computes its `out`, and only {runs} outlives a pod. {fix}"
        ]
    if text.startswith("~") or "$" in text or run_folder.is_address(text):
        return [f"out = {text}: only {runs} outlives a pod, where the claim is mounted. {fix}"]
    path = posixpath.normpath(posixpath.join(folder, text)) if text else f"{runs}/default"
    if not path.startswith(f"{posixpath.normpath(runs)}/"):
        return [
            f"out = {text}: is outside {runs}, where the claim is mounted, so it is lost with the"
            f" pod. {fix}"
        ]
    return []


def in_image(script: str, folder: str) -> str:
    """Return a script's path in the image, relative to the repository there.

    Raises `LaunchError` for a file outside the repository.
    """
    path = Path(script).resolve()
    for root in (REPOSITORY, Path(folder)):
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    raise LaunchError(
        f"{script}: is outside the repository, and the image contains only the repository. Copy it"
        " into recipes/ and build the image with it"
    )


def unexpanded(word: str) -> str:
    """Escape a word for Kubernetes.

    Kubernetes expands `$(NAME)` in commands and variables, and converts `$$` to `$`.
    """
    return word.replace("$", "$$")


def scalar(value: object) -> str:
    """Return a value as JSON that every YAML reader accepts.

    Characters outside printable ASCII are escaped one by one, because JSON's surrogate pairs are
    not valid YAML.
    """
    text = json.dumps(value, ensure_ascii=False)
    if lone := re.search("[\ud800-\udfff]", text):
        raise LaunchError(
            f"--where k8s: an argument contains the byte {ord(lone[0]) - 0xDC00:#x}, which is not"
            " valid text. Remove it, because a manifest cannot contain it"
        )
    return "".join(
        character if "\x20" <= character <= "\x7e" else f"\\U{ord(character):08x}"
        for character in text
    )


def number(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise LaunchError(
            f"--where k8s: {name} = {value!r} must be a number. Create the Job from the manifest"
            " that --dry-run prints"
        )
    return int(value)


def pods(
    arguments: argparse.Namespace, variables: dict[str, str]
) -> tuple[list[Host], int, str, int]:
    """Return the hosts of this pod's Job, the pod's index, the master address and the port.

    The function waits until the first pod has an address.
    """
    nodes = arguments.nodes or 1
    try:
        address, index, port = (
            variables["MASTER_ADDR"],
            *(number(name, variables[name]) for name in ("JOB_COMPLETION_INDEX", "MASTER_PORT")),
        )
    except KeyError as error:
        raise LaunchError(
            f"--where k8s: {error.args[0]} must be set. Create the Job from the manifest that"
            " --dry-run prints"
        ) from None
    if not 0 <= index < nodes:
        raise LaunchError(
            f"JOB_COMPLETION_INDEX = {index}: --nodes is {nodes}. Completions and parallelism of"
            " the Job must equal it"
        )
    began = told = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(address, port)
            break
        except OSError:
            now = time.monotonic()
            if now - began > WAIT:
                raise LaunchError(
                    f"MASTER_ADDR = {address}: did not resolve to an address within {WAIT:g} s."
                    " Check that the Service exists and that pod 0 is running",
                    code=START_AGAIN,
                ) from None
            if now - told > 10:
                told = now
                print(
                    f"launch: waiting for the address of {address}, {now - began:.0f} s", flush=True
                )
            time.sleep(1)
    slots = arguments.gpus or devices(variables) or 1
    return [Host(f"pod-{number}", slots, address) for number in range(nodes)], index, address, port
