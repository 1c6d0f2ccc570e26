"""Kubernetes manifests must follow the official schema, and their entry command runs as in two
pods.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from job import NANO, Job, metrics, reproducible_values, steps_done
from pool import ROOT
from two_hosts import two_hosts_or_skip
from words import arbitrary_words, expanded

from launch.__main__ import main

SECRETS = {
    "HF_TOKEN": "hf_fakeFAKEfake0001",
    "WANDB_API_KEY": "fake" * 10,
    "AWS_SECRET_ACCESS_KEY": "aws/fake+0003",
}


def render(*words: str) -> list[dict[str, Any]]:
    """Render a command's manifest; return its Service and its Job."""
    flags = [
        "--where",
        "k8s",
        "--nodes",
        "2",
        "--image",
        "registry.example/recipes:1",
        "--folder",
        str(ROOT),
        "--dry-run",
        *words,
    ]
    variables = os.environ | SECRETS | {"WANDB_PROJECT": "a $(name) of $$ mine\n'x'"}
    done = subprocess.run(
        [sys.executable, "-m", "launch", *flags],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert not [
        name
        for name, value in SECRETS.items()
        if value in done.stdout or name in done.stdout.partition("env: ")[2].splitlines()[0]
    ]
    return list(yaml.safe_load_all(done.stdout))


def container(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["spec"]["template"]["spec"]["containers"]
    return only


def stated(job: dict[str, Any]) -> dict[str, str]:
    """Return the variables that have a value in the manifest."""
    return {
        variable["name"]: expanded(variable["value"])
        for variable in container(job)["env"]
        if "value" in variable
    }


@pytest.mark.parametrize("version", ["1.29", "1.33", kubernetes_validate.latest_version()])
def test_the_manifest_holds_against_the_schema(version: str) -> None:
    service, job = render("--gpus", "8", "--max_restarts", "3", str(NANO), "--tiny")
    for document in (service, job):
        kubernetes_validate.validate(document, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            job | {"spec": job["spec"] | {"completions": "two"}}, version, strict=True
        )
    assert (
        job["spec"]["completionMode"] == "Indexed"
        and job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    )
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert container(job)["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    own = stated(job)
    assert own["WANDB_PROJECT"] == "a $(name) of $$ mine\n'x'"
    assert own["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"


def test_words_arrive_as_typed() -> None:
    words = [*arbitrary_words(), "--out", "runs/x"]  # some of the words are --out and ~
    _, job = render("--gpus", "8", str(NANO), *words)
    command = [expanded(word) for word in container(job)["command"]]
    script = command.index("recipes/llama_nano_zero2.py")  # relative to the image's folder
    assert command[:script] == [
        *(
            "python",
            "-m",
            "launch",
            "--where",
            "k8s",
            "--nodes",
            "2",
            "--gpus",
            "8",
            "--spawn",
            "deepspeed",
            "--max_restarts",
            "0",
        )
    ]
    assert command[script + 1 :] == words


RECIPE = "recipes/llama_nano_zero2.py"
MANIFESTS = [  # flags of launch, the script, the script's arguments
    (["--gpus", "8"], RECIPE, []),
    (["--gpus", "1", "--nodes", "64"], RECIPE, ["--tiny"]),
    (["--gpus", "8", "--max_restarts", "3"], RECIPE, ["--out", "runs/a b"]),
    (["--gpus", "8", "--spawn", "torchrun", "--bind_cores"], RECIPE, ["--out=runs/{job_id}"]),
    (
        ["--gpus", "8", "--name", "a-b-c", "--claim", "other-claim"],
        RECIPE,
        ["--out", "{folder}/runs/x"],
    ),
    (["--gpus", "8", "--master_port", "1234"], RECIPE, ["--out", "./runs/x/../y"]),
    (
        ["--gpus", "8", "--env", "PYTHONUNBUFFERED"],
        RECIPE,
        ["--dataset", "https://h/x.jsonl?part=1", "--no-wandb"],
    ),
    (["--gpus", "8", "--once"], "launch/rank.py", ["--out", "/anywhere"]),
    (["--gpus", "8", "--doctor"], "", ["--quick"]),
    (["--gpus", "8"], RECIPE, ["$(id)", "${HOME}", "ünï", "'", '"', "\\", "\n", "{name}"]),
    (["--gpus", "8"], "recipes/llama3_1_8b_zero3.py", ["--steps", "10", "--out", "runs/s"]),
    (
        ["--gpus", "16", "--image", "registry.example:5000/a/b@sha256:" + "0" * 64],
        RECIPE,
        ["--resume", "never"],
    ),
]


@pytest.mark.parametrize(
    ("flags", "script", "words"),
    MANIFESTS,
    ids=[" ".join([*flags, script, *words])[:60] for flags, script, words in MANIFESTS],
)
def test_manifests_of_twelve_commands_are_valid(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    script: str,
    words: list[str],
) -> None:
    """The schemas are from Kubernetes 1.30 and newer. The script has its path in the image."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    words = [word.replace("{folder}", "/opt/recipes") for word in words]
    here = str(ROOT / script) if script else ""
    assert (
        main(["--where", "k8s", "--image", "x", "--dry-run", *flags, *filter(None, [here]), *words])
        == 0
    )
    service, job = yaml.safe_load_all(capsys.readouterr().out)
    for document in (service, job):
        for version in ("1.30", "1.33", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(document, version, strict=True)
    command = [expanded(word) for word in container(job)["command"]]
    assert command[-len(words) - 1 :] == [script or "--doctor", *words]
    assert not [word for word in command if str(ROOT) in word]
    (job_id,) = [
        variable for variable in container(job)["env"] if variable["name"] == "LAUNCH_JOB_ID"
    ]
    assert job_id["valueFrom"] == {
        "fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}
    }


@pytest.mark.parametrize(
    "out",
    [
        "/data/run",
        "elsewhere/run",
        "runs",
        "runs/../x",
        "runs/../../x",
        "~/runs/x",
        "$SCRATCH/x",
        "s3://b/x",
        "/opt/recipes/runsx/y",
    ],
)
def test_a_run_folder_outside_the_claim_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    """The folder is given as a flag or in the recipe's file. It would be lost with the pod."""
    place = ["--where", "k8s", "--gpus", "8", "--image", "x", "--dry-run"]
    assert main([*place, str(NANO), "--out", out]) == 1
    (tmp_path / "mine.py").write_text(
        NANO.read_text().replace("Recipe(\n", f'Recipe(\n    out="{out}",\n', 1)
    )
    assert main([*place, "--folder", "/opt/recipes", str(tmp_path / "mine.py")]) == 1
    typed, written = capsys.readouterr().err.split("refused: 1 problem")[1:]
    assert typed == written and f"out = {out}: " in typed and "Use --out runs/NAME" in typed


def test_a_recipe_that_is_not_in_the_image_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe whose run folder cannot be read from its file is also rejected."""
    place = ["--where", "k8s", "--gpus", "8", "--image", "x", "--dry-run"]
    mine = tmp_path / "mine.py"
    mine.write_text(NANO.read_text())
    assert main([*place, str(mine)]) == 1
    mine.write_text(
        NANO.read_text().replace("Recipe(\n", 'Recipe(\n    out=os.environ["SCRATCH"],\n', 1)
    )
    assert main([*place, str(mine)]) == 1
    assert main([*place, "--folder", str(tmp_path), str(mine), "--out", "runs/x"]) == 0
    said = capsys.readouterr()
    assert (
        f"{mine}: is outside the repository" in said.err
        and "the recipe computes its `out`" in said.err
    )
    assert container(list(yaml.safe_load_all(said.out))[1])["command"][-3:] == [
        "mine.py",
        "--out",
        "runs/x",
    ]


def decided(job: dict[str, Any], code: int, disrupted: bool = False) -> str:
    """Return the Job controller's action for a pod that ends with `code`.

    The first matching rule decides. If no rule matches, the action is Count.
    """
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"containerName": "ranks", "operator": "In", "values": []})
        assert codes["containerName"] == container(job)["name"] and codes["operator"] == "In"
        if code in codes["values"] or (
            disrupted
            and any(
                condition["type"] == "DisruptionTarget"
                for condition in rule.get("onPodConditions", [])
            )
        ):
            return rule["action"]
    return "Count"


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_a_lost_pod_comes_back_and_a_refusal_fails_the_job(restarts: int) -> None:
    _, job = render("--gpus", "8", "--max_restarts", str(restarts), str(NANO))
    # The pods are drained or preempted, or their node is lost.
    assert [decided(job, code, disrupted=True) for code in (143, 137, 1)] == ["Ignore"] * 3
    # These are the exit codes of the job's other pods.
    assert [decided(job, code) for code in (75, 143)] == ["Ignore"] * 2
    assert [decided(job, code) for code in (1, 2)] == ["FailJob"] * 2
    assert decided(job, 137) == "Count" and job["spec"]["backoffLimit"] == 2 * (restarts + 1)


def test_a_pod_knows_how_long_it_may_take_to_end() -> None:
    _, job = render("--gpus", "8", str(NANO))
    own = {variable["name"]: variable.get("value") for variable in container(job)["env"]}
    assert (
        float(own["LAUNCH_GRACE"])
        == job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        == 600
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--name", "Über"], "is not a Kubernetes name"), (["--image", ""], "requires an image")],
)
def test_a_manifest_that_cannot_be_is_refused(words: list[str], told: str) -> None:
    flags = ["--where", "k8s", "--gpus", "8", "--image", "x", *words, "--dry-run", str(NANO)]
    done = subprocess.run(
        [sys.executable, "-m", "launch", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "") and told in done.stderr


@pytest.mark.parametrize("name", ["MASTER_PORT", "JOB_COMPLETION_INDEX"])
def test_a_number_that_is_none_is_named(tmp_path: Path, name: str) -> None:
    place = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        name: "x",
    }
    words = [sys.executable, "-m", "launch", "--where", "k8s", "--nodes", "2", str(NANO)]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | place,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1 and f"{name} = 'x' must be a number" in done.stderr


def test_a_variable_that_was_asked_for_is_in_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image has its own PYTHONPATH, unless the user requests the local one."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")

    def named(*words):
        return {
            variable["name"]
            for variable in container(render("--gpus", "8", *words, str(NANO))[1])["env"]
        }

    assert (
        "PYTHONUNBUFFERED" in named("--env", "PYTHONUNBUFFERED")
        and "PYTHONUNBUFFERED" not in named()
    )


def test_what_is_applied_is_printed_as_a_shell_takes_it(tmp_path: Path) -> None:
    """If a shell runs the text printed without --dry-run, kubectl receives the manifest."""
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\ncat > "{tmp_path}/$N"\n')
    (tmp_path / "kubectl").chmod(0o755)
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "N": "applied"}
    words = [
        sys.executable,
        "-m",
        "launch",
        "--where",
        "k8s",
        "--gpus",
        "8",
        "--image",
        "x",
        str(NANO),
        "$(id)",
        "`id`",
    ]
    done = subprocess.run(
        words, cwd=ROOT, env=variables, capture_output=True, text=True, check=True, timeout=60
    )
    subprocess.run(
        ["sh", "-c", done.stdout.removeprefix("launch: ")],
        env=variables | {"N": "typed"},
        check=True,
        timeout=60,
    )
    assert (tmp_path / "typed").read_text() == (tmp_path / "applied").read_text() != ""


def test_a_pod_that_waits_for_the_first_one_ends_when_it_is_told(tmp_path: Path) -> None:
    """A pod's first process receives only the signals for which it has a handler."""
    place = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": "1",
        "MASTER_ADDR": "nobody.invalid",
        "MASTER_PORT": "29500",
    }
    pod = Job(
        tmp_path,
        [sys.executable, "-u", "-m", "launch", "--where", "k8s", "--nodes", "2", str(NANO)],
        PYTHONPATH=str(ROOT),
        **place,
    )
    try:
        pod.wait_for(lambda: "waiting for the address" in pod.output, 60)
        pod.process.terminate()
        assert pod.wait(30) == 143, pod.output
    finally:
        pod.close()


def in_a_pod(job: dict[str, Any], run: Path) -> list[str]:
    """Return the manifest's command as it runs in `workingDir`, with a different run folder.

    These pods write their logs to a separate folder.
    """
    recipe = NANO.relative_to(container(job)["workingDir"]).as_posix()
    return [
        {recipe: str(NANO), "runs/mounted": str(run)}.get(word, word)
        for word in map(expanded, container(job)["command"])
    ]


@pytest.mark.slow
def test_two_pods_train_together(ops: Callable[[str], None], tmp_path: Path) -> None:
    """The numbers must equal the numbers on one machine.

    Each pod has a separate network namespace. The first pod's name gets its address only when the
    second pod is already waiting for the first.
    """
    with two_hosts_or_skip() as pods:
        flags = [str(NANO), "--tiny", "--steps", "3", "--no-wandb", "--no-export", "--out"]
        _, job = render("--gpus", "1", *flags, "runs/mounted")
        command = in_a_pod(job, tmp_path / "run")
        variables = stated(job)
        variables |= {
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        variables["PYTHONPATH"] = os.pathsep.join(
            [container(job)["workingDir"], str(ROOT / "recipes")]
        )
        started = []
        try:
            for index in (1, 0):
                in_container = [
                    "sh",
                    "-c",
                    'cd "$0" && exec "$@"',
                    container(job)["workingDir"],
                    *command,
                ]
                started.append(
                    Job(
                        tmp_path / f"pod_{index}",
                        pods.on(index, in_container),
                        JOB_COMPLETION_INDEX=str(index),
                        **variables,
                    )
                )
                if index:
                    started[0].wait_for(lambda: "waiting for the address" in started[0].output, 60)
                    for space in pods.spaces:
                        with (pods.file_of(space) / "hosts").open("a") as table:
                            table.write(f"{pods.addresses[0]} {variables['MASTER_ADDR']}\n")
            assert [pod.wait(240) for pod in started] == [0, 0], "\n".join(
                pod.output[-4000:] for pod in started
            )
            assert not pods.processes(0) and not pods.processes(1)
            whole = Job(
                tmp_path / "one_machine",
                [sys.executable, "-m", "launch", "--gpus", "2", *flags, "run"],
                PYTHONPATH=variables["PYTHONPATH"],
            )
            started.append(whole)
            assert whole.wait(240) == 0, whole.output[-4000:]
        finally:
            for pod in started:
                pod.close()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["mesh"]["world"] == 2
    assert len(metrics(tmp_path / "run")) == 3
    assert reproducible_values(metrics(tmp_path / "run")) == reproducible_values(
        metrics(tmp_path / "one_machine" / "run")
    )


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_lost_pod_comes_back_and_the_run_continues(
    ops: Callable[[str], None], tmp_path: Path, restarts: int
) -> None:
    """Without restarts the other pod exits with 75, and the Job starts it again.

    With a restart the other pod waits for the lost pod.
    """
    with two_hosts_or_skip() as pods, contextlib.ExitStack() as closed:
        flags = [
            "--tiny",
            "--steps",
            "40",
            "--save_every",
            "2",
            "--eval_every",
            "0",
            "--no-wandb",
            "--no-export",
        ]
        _, job = render(
            "--gpus",
            "1",
            "--max_restarts",
            str(restarts),
            str(NANO),
            *flags,
            "--out",
            "runs/mounted",
        )
        variables = stated(job) | {
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        variables["PYTHONPATH"] = os.pathsep.join(
            [container(job)["workingDir"], str(ROOT / "recipes")]
        )
        command = in_a_pod(job, tmp_path / "run")
        for space in pods.spaces:
            with (pods.file_of(space) / "hosts").open("a") as table:
                table.write(f"{pods.addresses[0]} {variables['MASTER_ADDR']}\n")

        def start(index: int, words: list[str]) -> Job:
            return closed.enter_context(
                contextlib.closing(
                    Job(
                        tmp_path / f"pod_{index}",
                        pods.on(index, words),
                        JOB_COMPLETION_INDEX=str(index),
                        **variables,
                    )
                )
            )

        refused = [start(index, [*command, "--lr=-1"]).wait(120) for index in (0, 1)]
        assert refused == [1, 1] and decided(job, 1) == "FailJob"

        first, second = start(0, command), start(1, command)
        first.wait_for(
            lambda: steps_done(tmp_path / "run") > 4 or first.process.poll() is not None, 240
        )
        assert first.process.poll() is None, first.output[-4000:]
        for process in pods.processes(0):
            process.kill()
        first.wait_gone(60)
        if not restarts:
            assert second.wait(120) == 75 and decided(job, 75) == "Ignore", second.output[-4000:]
            second = start(1, command)
        first = start(0, command)
        assert (first.wait(300), second.wait(300)) == (0, 0), (
            first.output[-4000:] + second.output[-4000:]
        )
    assert [line["step"] for line in metrics(tmp_path / "run")] == [*range(1, 41)]
    assert "resumed from" in first.output
