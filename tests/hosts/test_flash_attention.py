"""Releases of FlashAttention that torch's attention can use, by the metadata of real folders."""

import importlib
from pathlib import Path

import pytest
from recipe_files import FILES, load
from recipekit.hosts import checks
from recipekit.hosts.flash_attention import check_flash_attention
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import Problem


def install(folder: Path, package: str, release: str) -> None:
    """Write the metadata of an installed package, as pip does."""
    info = folder / f"{package.replace('-', '_')}-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose packages hide the environment's own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "torch", "2.13.0+cu130")
    return tmp_path


def rule_of(attention: str, gpus: bool = True) -> str:
    problems = check_flash_attention(attention, gpus)
    assert len(problems) <= 1
    return problems[0].rule if problems else ""


@pytest.mark.parametrize("attention", ["flash3", "flash4"])
def test_a_cpu_has_no_such_kernels(packages: Path, attention: str) -> None:
    install(packages, "flash-attn-4", "4.0.0b16")
    assert check_flash_attention(attention, gpus=False) == [
        Problem(
            f"attention = {attention}",
            "requires an NVIDIA GPU, and this run uses the CPU",
            "use --attention varlen, which needs no other package",
        )
    ]


@pytest.mark.parametrize("attention", ["auto", "varlen", "sdpa", "eager", "flash_attention_2"])
def test_other_attentions_need_no_such_package(packages: Path, attention: str) -> None:
    assert check_flash_attention(attention, gpus=False) == []
    assert check_flash_attention(attention, gpus=True) == []


@pytest.mark.parametrize(
    ("release", "fits"),
    [
        ("4.0.0b5", False),
        ("4.0.0b9", False),
        ("4.0.0b10", True),
        ("4.0.0b16", True),
        ("4.0.0b17", False),
        ("4.0.0b22", False),
        ("4.0.0", False),
        ("3.9.0b12", False),
    ],
)
def test_flash_attention_4_fits_in_some_betas(packages: Path, release: str, fits: bool) -> None:
    install(packages, "flash-attn-4", release)
    found = rule_of("flash4")
    assert found == (
        ""
        if fits
        else "requires flash-attn-4 4.0.0b10 to 4.0.0b16 with torch 2.13, and"
        f" {release} is installed"
    )


def test_a_missing_package_is_named(packages: Path) -> None:
    (problem,) = check_flash_attention("flash4", gpus=True)
    assert problem.rule.endswith("and no release is installed")
    assert problem.fix.startswith("run: pip install flash-attn-4==4.0.0b16, or")


@pytest.mark.parametrize(
    ("torch_release", "reason"),
    [
        ("2.11.0", ", whose backward pass refuses the windows that varlen_attn passes"),
        ("2.14.0", ""),
    ],
)
@pytest.mark.parametrize("attention", ["flash3", "flash4"])
def test_another_torch_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    torch_release: str,
    reason: str,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "torch", f"{torch_release}+cu130")
    install(tmp_path, "flash-attn-4", "4.0.0b16")
    expected = f"requires torch 2.13, and torch {torch_release} is installed"
    assert rule_of(attention) == expected + (reason if attention == "flash4" else "")


def test_flash_attention_3_needs_its_backward_pass(packages: Path) -> None:
    assert "flash_attn_interface is not installed" in rule_of("flash3")
    (packages / "flash_attn_interface.py").write_text("")
    importlib.invalidate_caches()
    install(packages, "fa3-fwd", "0.0.2")
    assert rule_of("flash3") == (
        "requires a backward pass, and fa3-fwd 0.0.2 computes only the forward pass"
    )
    install(packages, "flash-attn-3", "3.0.0")
    assert rule_of("flash3") == ""


def test_a_start_makes_the_check() -> None:
    flags = ["--tiny", "--attention", "flash4"]
    plan = resolve_run(parse(load("llama_nano_zero2").RECIPE, FILES["llama_nano_zero2"], flags))
    assert check_flash_attention("flash4", gpus=False)[0] in checks.check_start(plan)
