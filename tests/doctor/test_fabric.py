"""recipekit/doctor/fabric.py: links between GPUs, read from the output of Linux and the driver."""

import resource
from pathlib import Path

import pytest
from recipekit.doctor import fabric
from recipekit.doctor.fabric import (
    RankLocation,
    RdmaPort,
    check_adapters,
    check_nccl_network,
    expected_speeds,
    links_below_expected,
    nccl_network,
    parse_nvlink_matrix,
)
from recipekit.hosts.findings import ReportRow
from recipekit.spec.errors import Problem

# Output of `nvidia-smi topo -m` for two GPUs on a bridge of 4 links, and a third GPU alone.
MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\nGPU0\t X"
    " \tNV4\tPHB\tPXB\t0-31\t0\nGPU1\tNV4\t X \tSYS\tSYS\t0-31\t0\nGPU2\tPHB\tSYS\t X"
    " \tPIX\t32-63\t1\nNIC0\tPXB\tSYS\tPIX\t X \n\nLegend:\n\n  X    = Self\n  NV#  = Connection"
    " traversing a bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)


def adapter(
    root: Path, device: str, rate: str, state: str = "4: ACTIVE", layer: str = "InfiniBand"
) -> None:
    port = root / device / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in (("rate", rate), ("state", state), ("link_layer", layer)):
        (port / name).write_text(f"{text}\n")


def proc(
    folder: Path, modules: str = "", driver: str = "", rights: str = "0000000000000000"
) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "self" / "status").write_text(
        f"Name:\tpython\nCapPrm:\t{rights}\nCapEff:\t{rights}\n"
    )
    (folder / "modules").write_text(modules)
    if driver:
        (folder / "driver" / "nvidia").mkdir(parents=True)
        (folder / "driver" / "nvidia" / "version").write_text(driver)
    return folder


def test_ports_that_are_up(tmp_path: Path) -> None:
    adapter(tmp_path, "mlx5_0", "400 Gb/sec (4X NDR)")
    adapter(tmp_path, "mlx5_1", "2.5 Gb/sec (1X SDR)", state="1: DOWN")
    adapter(tmp_path, "mlx5_bond_0", "25 Gb/sec (1X EDR)", layer="Ethernet")
    assert fabric.active_rdma_ports(tmp_path) == [
        RdmaPort("mlx5_0", 400.0, "InfiniBand"),
        RdmaPort("mlx5_bond_0", 25.0, "Ethernet"),
    ]
    assert fabric.active_rdma_ports(tmp_path / "none") == []


def test_nvlinks_of_the_matrix() -> None:
    assert parse_nvlink_matrix(MATRIX) == {(0, 1): 4, (1, 0): 4}
    assert parse_nvlink_matrix("") == {}


def test_facts_are_of_the_gpus_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local ranks 0 and 1 use the GPUs with nvidia-smi's indices 1 and 0."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "topo").write_text(MATRIX)
    (tmp_path / "bin" / "nvidia-smi").write_text(
        '#!/bin/sh\n[ "$*" = "topo -m" ] && while IFS= read -r line; do echo "$line"; done <'
        f" {tmp_path / 'topo'}\n"
    )
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    adapter(tmp_path / "ib", "mlx5_0", "200 Gb/sec (4X HDR)")
    assert fabric.collect_links([1, 0], tmp_path / "ib") == {
        "ports": [["mlx5_0", 200.0, "InfiniBand"]],
        "nvlinks": [[0, 1, 4], [1, 0, 4]],
    }
    assert fabric.collect_links([2, 0], tmp_path / "none") == {"ports": [], "nvlinks": []}


CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
PEERMEM = "nvidia_uvm 4956160 0 - Live 0x0\nnvidia_peermem 16384 0 - Live 0x0\n"


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"limit": resource.RLIM_INFINITY, "modules": PEERMEM, "driver": CLOSED}, []),
        ({"limit": resource.RLIM_INFINITY, "driver": OPEN}, []),
        (
            {"limit": resource.RLIM_INFINITY, "driver": OPEN, "kernel": "5.4.0-150-generic"},
            ["GPUDirect RDMA"],
        ),
        ({"limit": resource.RLIM_INFINITY, "driver": CLOSED}, ["GPUDirect RDMA"]),
        ({"limit": 64 << 10, "driver": OPEN}, ["RLIMIT_MEMLOCK = 64 KiB"]),
        # Docker gives root these rights.
        (
            {"limit": 64 << 10, "driver": OPEN, "rights": "00000000a80425fb"},
            ["RLIMIT_MEMLOCK = 64 KiB"],
        ),
        ({"limit": 64 << 10, "driver": OPEN, "rights": "000001ffffffffff"}, []),  # CAP_IPC_LOCK
        ({"limit": 2 << 30, "driver": OPEN}, []),
        ({"limit": 64 << 10, "driver": CLOSED, "hosts": False}, []),
    ],
)
def test_what_keeps_an_adapter_from_serving(
    tmp_path: Path, about: dict, expected: list[str]
) -> None:
    adapter(tmp_path / "ib", "mlx5_0", "400 Gb/sec (4X NDR)")
    own = proc(
        tmp_path / "proc",
        **{name: about[name] for name in ("modules", "driver", "rights") if name in about},
    )
    found = list(
        check_adapters(
            about.get("hosts", True),
            tmp_path / "ib",
            own,
            about.get("kernel", "6.8.0"),
            about["limit"],
        )
    )
    assert found[0] == ReportRow("adapters", "mlx5_0 400 Gb/s InfiniBand")
    assert [item.where for item in found if isinstance(item, Problem)] == expected
    assert list(check_adapters(True, tmp_path / "none", own, "6.8.0", 0)) == []


def test_the_network_that_nccl_chose() -> None:
    log = (
        "h:1:1 [0] NCCL INFO NCCL version 2.29.7+cuda13.0\nh:1:1 [0] NCCL INFO Initialized NET"
        " plugin {0}\nh:1:1 [0] NCCL INFO Assigned NET plugin {0} to comm\n"
    )
    assert nccl_network(log.format("Socket")) == "Socket"
    assert nccl_network(log.format("IB") + "h:1:1 [0] NCCL INFO Using network IB\n") == "IB"
    assert nccl_network("") == ""


def test_nccl_over_sockets_beside_infiniband() -> None:
    infiniband, ethernet = (
        RdmaPort("mlx5_0", 400.0, "InfiniBand"),
        RdmaPort("mlx5_1", 100.0, "Ethernet"),
    )
    (problem,) = check_nccl_network({0: "Socket", 1: "Socket"}, [infiniband])
    assert (
        "uses sockets between hosts, although mlx5_0 with 400 Gb/s is there" in problem.rule
        and "NCCL_IB_DISABLE" in problem.fix
    )
    assert check_nccl_network({0: "IB", 1: "IB"}, [infiniband]) == []
    assert check_nccl_network({0: "Socket"}, [ethernet]) == []  # RoCE has to be requested
    assert check_nccl_network({0: ""}, [infiniband]) == []


def host(ports: list[list], lanes: int = 0, ranks: int = 2) -> dict:
    return {
        "ports": ports,
        "nvlinks": [[i, j, lanes] for i in range(ranks) for j in range(ranks) if i != j and lanes],
    }


def test_floors_inside_a_host() -> None:
    places = {rank: RankLocation(0, rank) for rank in range(2)}
    assert expected_speeds(places, {0: host([], lanes=18)}, "") == {
        (0, 1): (100.0, "18 NVLinks"),
        (1, 0): (100.0, "18 NVLinks"),
    }
    assert expected_speeds(places, {0: host([], lanes=12)}, "")[0, 1][0] == 100.0  # A100
    assert expected_speeds(places, {0: host([], lanes=4)}, "")[0, 1][0] == pytest.approx(
        100 / 3
    )  # a bridge
    assert expected_speeds(places, {0: host([])}, "")[0, 1] == (2.0, "PCIe")


def test_floors_between_hosts() -> None:
    """The minimum bandwidth for two hosts with two ranks each depends on shared adapters.

    The minimum is half of 50 GB/s if each rank has an adapter, and half of that value if two ranks
    share an adapter.
    """
    places = {
        0: RankLocation(0, 0),
        1: RankLocation(0, 1),
        2: RankLocation(2, 0),
        3: RankLocation(2, 1),
    }
    port = lambda name, layer="InfiniBand": [name, 400.0, layer]  # noqa: E731
    both = host([port("mlx5_0"), port("mlx5_1")], lanes=18)
    one = host([port("mlx5_0")], lanes=18)
    assert expected_speeds(places, {0: both, 2: both}, "IB")[0, 2] == (25.0, "400 Gb/s adapters")
    # In round 2 both ranks of each host send data.
    assert expected_speeds(places, {0: both, 2: one}, "IB")[0, 2][0] == 12.5
    # In round 1 only rank 1 sends to a different host.
    assert expected_speeds(places, {0: one, 2: one}, "IB")[1, 2][0] == 25.0
    roce = host([port("mlx5_0", "Ethernet")])
    assert (0, 2) not in expected_speeds(places, {0: roce, 2: roce}, "Socket") and expected_speeds(
        places, {0: roce, 2: roce}, "IB"
    )[0, 2][0] == 12.5
    assert (0, 2) not in expected_speeds(places, {0: host([]), 2: both}, "IB")


def test_links_below_their_floor_are_named() -> None:
    least = {(0, 1): (100.0, "18 NVLinks"), (0, 2): (25.0, "400 Gb/s adapters")}
    assert links_below_expected({(0, 1): 100.0, (0, 2): 25.1, (1, 2): 0.1}, least) == {}
    assert links_below_expected({(0, 1): 21.3, (0, 2): 1.1}, least) == {
        (0, 1): "21.30 GB/s over 18 NVLinks, at least 100.0 is expected",
        (0, 2): "1.10 GB/s over 400 Gb/s adapters, at least 25.0 is expected",
    }
