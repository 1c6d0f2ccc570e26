"""The wrapper around a rank of the GPU bench: kernels by kind, a profile, a measure left out."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pool import ROOT

sys.path.insert(0, str(ROOT / "tools" / "bench"))

import gpu_run
from gpu_run import Kernel


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)", "communication"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matrix products"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "compiled"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp>", "reductions"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "elementwise"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex", "other"),
        ("aten::mm", "matrix products"),
        ("aten::copy_", "copies"),
    ],
)
def test_a_kernel_has_a_kind(kernel: str, kind: str):
    assert gpu_run.kernel_kind(kernel) == kind


def test_kernels_that_overlap_are_busy_once():
    """Of 10 ms, 2 to 5 and 7 to 8 have a kernel, so 6 ms are idle."""
    kernels = [
        Kernel("nvjet_b", 3000, 5000),
        Kernel("nvjet_a", 2000, 4000),
        Kernel("Memcpy DtoD", 7000, 8000),
        Kernel("nvjet_b", 4000, 4500),
    ]
    assert gpu_run.kernel_times(kernels, 0.010) == {
        "wall_ms": 10.0,
        "idle_ms": 6.0,
        "kinds": [
            {"kind": "matrix products", "ms": 4.5, "longest": "nvjet_b"},
            {"kind": "copies", "ms": 1.0, "longest": "Memcpy DtoD"},
        ],
    }


def test_one_step_is_profiled(tmp_path: Path):
    import torch

    file, weight = tmp_path / "profile.json", torch.ones(64, 64)
    step = gpu_run.profile_step(lambda factor, bias: weight @ weight * factor + bias, 2, file)
    assert step(2.0, bias=1.0)[0, 0] == 129.0 and not file.exists()
    assert step(2.0, bias=0.0)[0, 0] == 128.0
    found = json.loads(file.read_text())
    file.unlink()
    assert step(1.0, bias=0.0)[0, 0] == 64.0 and not file.exists()
    kinds = {each["kind"]: each for each in found["kinds"]}
    assert kinds["matrix products"]["longest"] == "aten::mm"
    assert {"aten::mul", "aten::add"} & {kinds["elementwise"]["longest"]}
    assert 0 < kinds["matrix products"]["ms"] < found["wall_ms"]


def test_a_measure_is_left_out(monkeypatch: pytest.MonkeyPatch):
    from recipekit.engine import deepspeed_engine
    from recipekit.kernels import cross_entropy
    from recipekit.optim import repairs

    monkeypatch.setattr(cross_entropy, "BLOCK_LOGITS", 7)
    gpu_run.leave_out("blocks")
    assert cross_entropy.BLOCK_LOGITS == 1 << 24

    name = "sum_without_copies"
    assert hasattr(repairs, name) == hasattr(deepspeed_engine, name), "the engine calls it by name"
    called: list[Any] = []
    monkeypatch.setattr(deepspeed_engine, name, called.append, raising=False)
    gpu_run.leave_out("sum")
    vars(deepspeed_engine)[name]("engine")
    assert not called


@pytest.mark.parametrize(
    ("nccl", "asked", "shares"),
    [
        ((2, 30, 7), "1", True),
        ((3, 0, 0), "1", True),
        ((2, 30, 7), "", False),
        ((2, 28, 9), "1", False),
        (None, "1", False),
    ],
)
def test_nccl_2_30_shares_a_gpu_if_asked(
    nccl: tuple[int, int, int] | None, asked: str, shares: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", asked)
    assert gpu_run.shares_gpu(nccl) is shares
    assert gpu_run.nccl_version(23007) == (2, 30, 7) and gpu_run.nccl_version(22809) == (2, 28, 9)
    assert gpu_run.loaded_nccl() is None, "no GPU, no NCCL"
