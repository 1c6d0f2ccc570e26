"""Start a recipe, or any script, on one machine, on the hosts of a hostfile, with Slurm or on
Kubernetes.

    python -m launch recipes/NAME.py [FLAGS OF THE RECIPE]
    python -m launch --hostfile HOSTS recipes/NAME.py
    python -m launch --where slurm --nodes 2 --gpus 8 recipes/NAME.py
    python -m launch --where k8s --nodes 2 --gpus 8 --image IMAGE --dry-run recipes/NAME.py \\
        | kubectl apply -f -
    python -m launch --hostfile HOSTS --doctor [FLAGS OF recipekit doctor]
    python -m launch --hostfile HOSTS --once SCRIPT [FLAGS OF SCRIPT]

On a login node of Slurm, use sbatch launch/slurm.sbatch. --once starts one process on each host.

Put the flags of launch before the recipe. Everything after the recipe reaches the recipe exactly as
typed. A script that --once starts gets the variables RANK (first rank of its host),
LOCAL_WORLD_SIZE (ranks of its host), WORLD_SIZE (ranks of all hosts), MASTER_ADDR and MASTER_PORT.
For more, read launch/README.md.

Exit codes:
    0            done
    1            refused or failed; the same command would fail again
    2            wrong command line
    75           a rank, a host or a disk failed; the same command can continue the run
    143 or 130   stopped after a checkpoint
"""

import argparse
import difflib
import io
import itertools
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from . import allocation, environment, hosts, kubernetes, restart, slurm, spawn
from .connection import REPOSITORY
from .cores import usable_cores
from .errors import LaunchError
from .hosts import Host
from .job import Job, Start, new_logs
from .screen import SCREEN

DOCTOR = REPOSITORY / "launch" / "doctor.py"
# The words of a different command that starts launch, which sets this variable
# (recipekit/commands/run.py).
TYPED_AS = "LAUNCH_TYPED_AS"
# The shipped recipes: next to this package in a clone, inside recipekit in an installed wheel
RECIPES = next(
    (
        folder
        for folder in (REPOSITORY / "recipekit" / "recipes", REPOSITORY / "recipes")
        if folder.is_dir()
    ),
    Path("recipes"),
)


def main(argv: list[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Print a byte of a file name that is not UTF-8 as an escape.
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = make_parser()
    given = sys.argv[1:] if argv is None else argv
    own, words = split(parser, given)
    arguments, unknown = parser.parse_known_args(own)
    if unknown:
        parser.error("\n".join(meant(parser, word) for word in unknown if word.startswith("-")))
    arguments.words = words
    if not words and not arguments.doctor:
        parser.error(
            "the recipe is missing, for example: python -m launch recipes/llama_nano_zero2.py"
            " --tiny"
        )
    if arguments.max_restarts < 0:
        parser.error(f"--max_restarts {arguments.max_restarts}: must be 0 or more")
    try:
        return launch(arguments, given)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:  # before anything has started
        return 130


def make_parser() -> argparse.ArgumentParser:
    usage = "python -m launch [FLAGS OF LAUNCH] recipes/NAME.py [FLAGS OF THE RECIPE]"
    parser = argparse.ArgumentParser(
        prog="python -m launch",
        usage=usage,
        description=__doc__,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="recipes/NAME.py ...",
        help="Recipe (file or name), followed by its flags.",
    )

    ranks = parser.add_argument_group("ranks and hosts")
    ranks.add_argument(
        "--where",
        choices=("local", "hostfile", "slurm", "k8s"),
        help=(
            "Place to start the ranks. (default: slurm or k8s if launch runs there, else hostfile"
            " with --hostfile, else local)"
        ),
    )
    ranks.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="File with one line for each host: NAME slots=RANKS. See launch/hostfile.example.",
    )
    ranks.add_argument(
        "--nodes",
        type=number,
        metavar="N",
        help=(
            "Number of hosts: the first N of the hostfile, or N requested from Slurm or Kubernetes."
            " Further hosts of the hostfile are spares for --max_restarts."
        ),
    )
    ranks.add_argument(
        "--gpus",
        type=number,
        metavar="N",
        help=(
            "Number of ranks on each host. (default: its slots in the hostfile, its number of GPUs,"
            " or 1)"
        ),
    )
    ranks.add_argument(
        "--spawn",
        choices=("deepspeed", "torchrun"),
        default="deepspeed",
        help="Program that starts the ranks of a host. (default: %(default)s)",
    )
    ranks.add_argument(
        "--bind_cores",
        "--bind-cores",
        action="store_true",
        help="Pin each rank to its share of the CPU cores in the NUMA node of its GPU.",
    )

    instead = parser.add_argument_group("instead of starting the recipe")
    instead.add_argument(
        "--dry_run",
        "--dry-run",
        action="store_true",
        help="Print the commands and start nothing. With --where k8s, print the manifest.",
    )
    instead.add_argument(
        "--doctor",
        action="store_true",
        help="Run recipekit doctor on every host. All flags that follow are passed to the doctor.",
    )
    instead.add_argument(
        "--once",
        action="store_true",
        help="Run a script once on every host instead of once for each rank.",
    )

    restarts = parser.add_argument_group("restarts")
    restarts.add_argument(
        "--max_restarts",
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help=(
            "Maximum number of restarts after a failure, from the newest complete checkpoint. 0"
            " disables restarts. (default: 0)"
        ),
    )
    wait = f"Seconds that a restart waits for unreachable hosts. (default: {restart.WAIT_HOSTS:g})"
    restarts.add_argument("--wait_hosts", "--wait-hosts", type=number, metavar="SECONDS", help=wait)

    connections = parser.add_argument_group("connections")
    connections.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME",
        help=(
            "Environment variable to pass to every host in addition. Its value is not printed. You"
            " may repeat the flag."
        ),
    )
    connections.add_argument(
        "--ssh_config",
        "--ssh-config",
        default="",
        metavar="FILE",
        help="SSH configuration file, passed on as ssh -F FILE.",
    )
    connections.add_argument(
        "--python",
        default="",
        metavar="PATH",
        help="Python interpreter on every host. (default: the one that runs launch)",
    )
    connections.add_argument(
        "--master_addr",
        "--master-addr",
        default="",
        metavar="ADDRESS",
        help="Address of the first host, as the other hosts reach it. (default: detected)",
    )
    connections.add_argument(
        "--master_port",
        "--master-port",
        type=number,
        default=0,
        metavar="PORT",
        help="Port on the first host for the process group. (default: a free port)",
    )

    kubernetes.add_flags(parser.add_argument_group("Slurm and Kubernetes"))
    return parser


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Formatter that prints each flag on one line if it fits, in only one of its two spellings."""

    def __init__(self, prog: str) -> None:
        super().__init__(
            prog, max_help_position=28, width=min(120, shutil.get_terminal_size().columns)
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        spellings = {
            option.strip("-").replace("-", "_"): option
            for option in reversed(action.option_strings)
        }
        value = (
            ""
            if action.nargs == 0
            else " " + self._format_args(action, self._get_default_metavar_for_optional(action))
        )
        return ", ".join(reversed(spellings.values())) + value


def split(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into launch's own flags, and the recipe with everything after it.

    argparse must not see the second part, because it would drop a `--`. `--sbatch --time=10`
    becomes one word, because argparse accepts no value that starts with a hyphen.
    """
    own, index = list[str](), 0
    while index < len(argv) and argv[index].startswith("-"):
        word, action = argv[index], parser._option_string_actions.get(argv[index])
        if word == "--doctor":
            return [*own, word], argv[index + 1 :]
        words = 1 if action is None or action.nargs == 0 else 2
        own += (
            ["=".join(argv[index : index + 2])]
            if word == "--sbatch"
            else argv[index : index + words]
        )
        index += words
    return own, argv[index:]


def meant(parser: argparse.ArgumentParser, flag: str) -> str:
    options = {option.lstrip("-"): option for option in parser._option_string_actions}
    near = difflib.get_close_matches(flag.partition("=")[0].lstrip("-"), options, 1, cutoff=0.75)
    hint = f"Did you mean {options[near[0]]}?" if near else ""
    return (
        f"{flag}: is not a flag of launch. {hint or 'Write the flags of the recipe after its file'}"
    )


def nearest(missing: Path) -> str:
    """Suggest an existing file that the user may have meant."""
    shipped = {path.name: path.stem for path in sorted(RECIPES.glob("*.py"))}
    there = shipped | {
        path.name: path
        for folder in (Path("recipes"), missing.parent)
        for path in sorted(folder.glob("*.py"))
    }
    if near := difflib.get_close_matches(f"{missing.stem}.py", there, 1):
        return f"Did you mean {there[near[0]]}?"
    return (
        "Give the path of a recipe, for example recipes/llama_nano_zero2.py (flags of launch come"
        " before it)"
    )


def script(word: str) -> str:
    """Return the file that a word names.

    This is the word itself or, if no such file exists, the shipped recipe with that name.
    """
    shipped = RECIPES / f"{word.removesuffix('.py')}.py"
    return (
        str(shipped)
        if os.sep not in word and not os.path.exists(word) and shipped.is_file()
        else word
    )


def number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def launch(arguments: argparse.Namespace, argv: list[str]) -> int:
    variables = dict(os.environ)
    hosts.check_alone(variables)
    words = (
        (str(DOCTOR), *arguments.words)
        if arguments.doctor
        else (script(arguments.words[0]), *arguments.words[1:])
    )
    where = arguments.where or hosts.detect(variables, arguments.hostfile)
    check_script(words[0], arguments, argv)
    if arguments.doctor and (
        late := next((word for word in arguments.words if word in ("--dry-run", "--dry_run")), "")
    ):
        raise LaunchError(
            f"{late}: must come before --doctor, because the doctor reads the rest of the line."
            " Move it before --doctor"
        )
    if problems := misplaced(arguments, where, variables):
        raise LaunchError(*problems)
    if arguments.hostfile and where != "hostfile":
        raise LaunchError(
            f"--hostfile {arguments.hostfile}: cannot be combined with --where {where}, which finds"
            " its hosts itself. Leave out one of the two flags"
        )

    if where == "slurm" and "SLURM_JOB_ID" not in variables:
        return slurm.submit(arguments, argv, variables)
    if where == "k8s" and "JOB_COMPLETION_INDEX" not in variables:
        return kubernetes.render(arguments, words, variables)
    job = plan(arguments, words, where, variables)
    show(job, arguments, variables)
    if arguments.dry_run:
        return 0
    if arguments.once or arguments.doctor:
        return once(job)
    return restart.run(job, arguments.max_restarts, say, arguments.wait_hosts or restart.WAIT_HOSTS)


def check_script(file: str, arguments: argparse.Namespace, argv: list[str]) -> None:
    """Raise `LaunchError` if the script does not exist.

    The error suggests the flag or file that the user may have meant.
    """
    if Path(file).is_file():
        return
    before = argv[: len(argv) - len(arguments.words)]
    if arguments.sbatch and before[-1].endswith(flag := arguments.sbatch[-1]) and "=" not in flag:
        raise LaunchError(
            f"{file}: the file does not exist. If it is the value of {flag}, write both as"
            " one word for sbatch, for example --sbatch=--partition=gpu"
        )
    raise LaunchError(f"{file}: the file does not exist. {nearest(Path(file))}")


READ_BY = {
    "ssh_config": ("hostfile",),
    "sbatch": ("slurm",),
    "wait_hosts": ("hostfile", "slurm"),
    **dict.fromkeys(("image", "folder", "claim", "name"), ("k8s",)),
    # an image contains its own Python, and the first pod is found by its name
    **dict.fromkeys(("python", "master_addr"), ("local", "hostfile", "slurm")),
}


def misplaced(arguments: argparse.Namespace, where: str, variables: dict[str, str]) -> list[str]:
    """Return the errors for flags and variables that do not fit this place.

    Such a flag has no effect here, and such a variable cannot be passed on.
    """
    problems = [
        f"--{flag}: is not read with --where {where}, only with {' and '.join(places)}. Leave"
        " it out"
        for flag, places in READ_BY.items()
        if getattr(arguments, flag) and where not in places
    ]
    if arguments.max_restarts and (arguments.once or arguments.doctor):
        problems.append(
            f"--max_restarts {arguments.max_restarts}: cannot be combined with a program that runs"
            " once on each host, because launch does not restart it. Leave it out"
        )
    if arguments.wait_hosts and not arguments.max_restarts and where in READ_BY["wait_hosts"]:
        problems.append(
            f"--wait_hosts {arguments.wait_hosts}: only a restart waits for hosts. Add"
            " --max_restarts N, or leave it out"
        )
    if arguments.bind_cores and (arguments.once or arguments.doctor):
        problems.append(
            "--bind_cores: cannot be combined with a program that runs once on each host, because"
            " it uses all cores. Leave it out"
        )
    starts_there = (where == "slurm" and "SLURM_JOB_ID" not in variables) or (
        where == "k8s" and "JOB_COMPLETION_INDEX" not in variables
    )
    keep = (
        "Slurm stores exported variables in files"
        if where == "slurm"
        else "a manifest is stored and shown in plain text"
    )
    for before, word in (
        itertools.pairwise(("the recipe's words", *arguments.words)) if starts_there else ()
    ):
        if "://" in word and environment.holds_secret(word):
            flag = word.partition("=")[0] if word.startswith("--") else before
            problems.append(
                f"{flag}: the address contains a key or a password, and {keep}. Use an address"
                " without one, or a path on the cluster"
            )
    for name in arguments.env:
        if name not in variables:
            problems.append(f"--env {name}: is not set. Export it first")
        elif starts_there and environment.is_secret(name, variables[name]):
            way = (
                "log in once on the cluster, because all nodes read its login files (hf auth login,"
                " wandb login)"
            )
            if where == "k8s":
                way = (
                    "put it into the job's Secret: kubectl create secret generic NAME-secrets"
                    f" --from-file={name}=FILE"
                )
            problems.append(f"--env {name}: is a secret, and {keep}. Leave it out, and {way}")
    return problems


def plan(
    arguments: argparse.Namespace, words: tuple[str, ...], where: str, variables: dict[str, str]
) -> Job:
    """Plan the job for this place. Raises `LaunchError` if no plan is possible."""
    node, master_addr, master_port = None, arguments.master_addr, arguments.master_port
    if where == "k8s":
        machines, node, master_addr, master_port = kubernetes.pods(arguments, variables)
    else:
        machines = machines_of(arguments, where, variables)
    most = arguments.nodes if where == "hostfile" and arguments.nodes else len(machines)
    python = arguments.python or sys.executable
    given = environment.needed(variables, arguments.env)
    if where == "slurm":
        given |= granted(variables)
    return Job(
        hosts=tuple(machines[:most]),
        spares=tuple(machines[most:]) if where == "hostfile" else (),
        spawn="once" if arguments.once or arguments.doctor else arguments.spawn,
        words=words,
        python=os.path.abspath(python) if os.sep in python else python,
        folder=os.getcwd(),
        environment=given | environment.secrets(variables, arguments.env),
        where=where,
        ssh_config=arguments.ssh_config,
        master_addr=master_addr,
        master_port=master_port,
        node=node,
        bind_cores=arguments.bind_cores,
        overlap=where == "slurm" and hosts.in_step(variables),
        typed=(
            typed()
            if where in ("local", "hostfile") and sys.orig_argv[-len(words) :] == [*words]
            else ()
        ),
    )


def machines_of(arguments: argparse.Namespace, where: str, variables: dict[str, str]) -> list[Host]:
    """Return a job's hosts outside Kubernetes. Raises `LaunchError` if they cannot be found."""
    if where == "hostfile":
        if not arguments.hostfile:
            raise LaunchError(
                "--where hostfile: requires a hostfile. Name it with --hostfile FILE (example:"
                " launch/hostfile.example)"
            )
        return hosts.read_hostfile(arguments.hostfile, arguments.nodes, arguments.gpus)
    if where == "slurm":
        machines = hosts.slurm_hosts(variables, arguments.gpus)
        if arguments.nodes and arguments.nodes != len(machines):
            raise LaunchError(
                f"--nodes {arguments.nodes}: the job has {len(machines)}. Give the number to sbatch"
                " instead"
            )
        return machines
    if arguments.nodes not in (None, 1):
        raise LaunchError(
            f"--nodes {arguments.nodes}: requires several hosts. Name them with --hostfile"
            " FILE, or use --where slurm or k8s"
        )
    return [Host("localhost", arguments.gpus or hosts.devices(variables) or 1, "127.0.0.1")]


def granted(variables: dict[str, str]) -> dict[str, str]:
    """Return the variable with the seconds between Slurm's warning and the job's end.

    If the time limit is too short for the warning, this is reported.
    """
    try:
        told = allocation.allocation(variables["SLURM_JOB_ID"])
    except LaunchError:
        return {}
    warning = allocation.seconds_in(variables.get(allocation.GRACE, "")) or told.warning
    if short := allocation.short_limit(told.limit, warning):
        say(short)
    return {allocation.GRACE: f"{warning:g}"} if warning else {}


def typed() -> tuple[str, ...]:
    """Return this command as the user typed it."""
    name = os.environ.get(TYPED_AS)
    return (*name.split(), *sys.argv[1:]) if name else tuple(sys.orig_argv)


def show(job: Job, arguments: argparse.Namespace, variables: dict[str, str]) -> None:
    """Print each host's command, and the names of the variables that are passed to the host."""
    ranks, cores = sum(host.slots for host in job.hosts), usable_cores()
    who = (
        "once on each host"
        if job.spawn == "once"
        else f"{ranks} rank{'s' if ranks > 1 else ''}, forked by {job.spawn}"
    )
    if (
        job.where == "local"
        and ranks == 1 < cores
        and not arguments.gpus
        and not hosts.devices(variables)
        and job.spawn != "once"
    ):
        say(
            f"1 rank on {cores} cores, and no GPU: {os.environ.get(TYPED_AS, 'python -m launch')}"
            f" --gpus {cores} {job.words[0]} starts {cores} ranks"
        )
    say(f"{job.where}: {len(job.hosts)} host{'s' if len(job.hosts) > 1 else ''}, {who}")
    for node, host in enumerate(job.hosts):
        if job.node in (None, node):
            say(f"  {host.name}: {command_on(job, node)}")
    if job.where != "local":
        secret = environment.secrets(variables, arguments.env)
        names = [name + (" (secret)" if name in secret else "") for name in job.environment]
        say(f"  variables that travel with it, through stdin: {', '.join(names) or 'none'}")
        for line in environment.left_behind(variables, job.environment, "--env NAME passes it on"):
            say(f"  {line}")


def command_on(job: Job, node: int) -> str:
    """Return the command that starts a host's ranks, with the prefix that reaches the host."""
    host = job.hosts[node]
    meeting = spawn.Meeting(
        tuple(machine.slots for machine in job.hosts),
        node,
        job.master_addr or job.hosts[0].address or "ADDRESS_OF_THE_FIRST_HOST",
        job.master_port,
    )
    words = spawn.command(
        job.spawn,
        job.python,
        meeting,
        [str(index) for index in range(host.slots)],
        list(job.words),
    )
    through = (
        f"{shlex.join(job.connection(host))} <- " if job.where in ("hostfile", "slurm") else ""
    )
    return f"{through}{shlex.join(map(environment.shown, words))}"


def once(job: Job) -> int:
    """Run the script once on each host, print its output and return the exit code."""
    began = time.monotonic()
    logs = new_logs(Path(job.folder) / "runs" / f"{Path(job.words[0]).stem}.logs")
    outcome = Start(job, logs, say).run()
    if outcome.text:
        say(outcome.text)
    say(
        f"{Path(job.words[0]).name} on {len(job.hosts)} host{'s' if len(job.hosts) > 1 else ''}:"
        f" exit code {outcome.code}, {time.monotonic() - began:.0f} s"
    )
    return outcome.code


def say(text: Any) -> None:
    SCREEN.write(f"launch: {text}\n")


if __name__ == "__main__":
    # In a pod this is process 1, which ignores SIGTERM unless it has a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # ranks print UTF-8 in every locale
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.exit(main())
