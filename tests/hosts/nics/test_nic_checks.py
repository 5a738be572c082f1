"""What doctor finds at NICs and in settings: a sound machine is let alone, each planted trouble is named."""

from collections.abc import Callable, Mapping
from pathlib import Path

import hgx
import pytest

from kvbench.hosts.nics.checks import Machine, nic_checks, pcie_gbit, version_checks
from kvbench.hosts.nics.variable_rules import settings_checks
from kvbench.hosts.version_rules import Check


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return hgx.machine(tmp_path)


def checked(root: Path) -> dict[str, Check]:
    found = nic_checks(Machine.at(root, 8, hgx.ADDRESSES), {})
    assert all(check.fix for check in found if check.status != "ok")
    return {check.name: check for check in found}


def test_a_sound_machine(root: Path) -> None:
    found = checked(root)
    assert {check.status for check in found.values()} == {"ok"}
    assert "mlx5_8 (400 Gbit/s, NUMA node 1)" in found["nics"].detail
    assert found["nic links"].detail == "all up, mlx5_4:1, mlx5_9:1 switched off"
    assert found["gids"].detail == "RoCE v2 at index 3"
    assert found["pcie"].detail == "wide enough for 8 NICs"
    assert found["peer memory"].detail == "nvidia_peermem is loaded"
    assert "numa balancing" in found


def port(name: str, value: str) -> Callable[[Path], object]:
    return lambda root: (hgx.device(root, "mlx5_1") / name).write_text(value + "\n")


def pci(name: str, value: str) -> Callable[[Path], object]:
    return lambda root: (hgx.pci(root, "mlx5_1") / name).write_text(value + "\n")


def file(name: str, value: str) -> Callable[[Path], object]:
    return lambda root: hgx.write(root, {name: value})


def without(name: str) -> Callable[[Path], object]:
    def remove(root: Path) -> None:
        for path in sorted((root / name).rglob("*"), reverse=True):
            path.unlink()
        (root / name).rmdir()

    return remove


def no_version_2(root: Path) -> None:
    for index in ("1", "3"):
        (hgx.device(root, "mlx5_1") / "gids" / index).unlink()


def no_address(root: Path) -> None:
    (hgx.device(root, "mlx5_1") / "gids/3").unlink()


def another_index(root: Path) -> None:
    folder = hgx.device(root, "mlx5_1")
    (folder / "gids/5").write_text((folder / "gids/3").read_text())
    (folder / "gid_attrs/types/5").write_text("RoCE v2\n")
    (folder / "gids/3").unlink()


def other_cable(root: Path) -> None:
    (hgx.device(root, "mlx5_1") / "state").write_text("1: DOWN\n")
    (hgx.device(root, "mlx5_1") / "phys_state").write_text("2: Polling\n")


@pytest.mark.parametrize(
    ("plant", "name", "status", "expected", "fix"),
    [
        (other_cable, "nic links", "warn", "no link on mlx5_1:1", "check cable"),
        (no_version_2, "gids", "missing", "no RoCE v2 GID on mlx5_1:1", "cma_roce_mode"),
        (no_address, "gids", "warn", "only link-local GIDs on mlx5_1:1", "IPv4 address"),
        (another_index, "gids", "warn", "mlx5_1:1 5", "leave MC_GID_INDEX"),
        (pci("net/rail1/mtu", "1500"), "mtu", "warn", "rail1 1500", "mtu 9000"),
        (pci("net/rail1/mtu", "4200"), "mtu", "warn", "not the same", "mtu 9000"),
        (pci("current_link_width", "8"), "pcie", "warn", "x8, 252 Gbit/s for a NIC of 400", "wider slot"),
        (pci("current_link_speed", "16.0 GT/s PCIe"), "pcie", "warn", "could have x16 at 32", "bifurcation"),
        (pci("iommu_group/type", "DMA-FQ"), "iommu", "warn", "mlx5_1 DMA-FQ", "iommu=pt"),
        (without("sys/module/nvidia_peermem"), "peer memory", "missing", "nvidia_peermem", "modprobe"),
        (file("proc/sys/kernel/numa_balancing", "1"), "numa balancing", "warn", "2 nodes", "sysctl"),
        (
            file("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"), "huge pages",
            "warn", "transparent: never", "madvise",
        ),
    ],
)  # fmt: skip
def test_each_trouble_is_named_with_its_mend_and_alone(
    root: Path, plant: Callable[[Path], object], name: str, status: str, expected: str, fix: str
) -> None:
    plant(root)
    found = checked(root)
    assert found[name].status == status
    assert expected in found[name].detail
    assert fix in found[name].fix
    assert [check.name for check in found.values() if check.status != "ok"] == [name]


def test_two_ports_share_their_cards_slot(root: Path) -> None:
    """A second port of 400 Gbit/s behind the same x16 slot: together they are faster than it."""
    first = hgx.pci(root, "mlx5_0")
    second = first.with_name(first.name[:-1] + "1")
    hgx.add_pci(root, str(second.relative_to(root.resolve() / "sys/devices")), 0)
    hgx.add_nic(root, str(second.relative_to(root.resolve() / "sys/devices")), "mlx5_10", "rail10", 10)
    check = checked(root)["pcie"]
    assert check.status == "warn"
    assert "mlx5_0 and mlx5_10 32 GT/s x16, 504 Gbit/s for a NIC of 800" in check.detail


def test_peer_memory_may_be_dmabuf(root: Path) -> None:
    without("sys/module/nvidia_peermem")(root)
    hgx.write(root, {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module 580.95.05"})
    assert checked(root)["peer memory"].detail.startswith("by dmabuf")


def test_a_machine_with_nothing(tmp_path: Path) -> None:
    found = {check.name: check for check in nic_checks(Machine.at(tmp_path, 0, {}), {})}
    assert found["nics"].status == "warn"
    assert "kvbench lab up" in found["nics"].fix
    assert not {"nic links", "gids", "iommu", "peer memory", "numa balancing"} & set(found)


@pytest.mark.parametrize(
    ("speed", "width", "gbit"),
    [
        (2.5, 1, 2.0), (8.0, 8, 63.0), (16.0, 16, 252.1), (32.0, 16, 504.1), (64.0, 16, 968.0),
        (None, 16, None),
    ],
)  # fmt: skip
def test_what_a_pcie_link_carries(speed: float | None, width: int, gbit: float | None) -> None:
    assert pcie_gbit(speed, width) == (None if gbit is None else pytest.approx(gbit, abs=0.1))


def test_versions_are_told_where_they_are_installed() -> None:
    versions = {"mooncake-transfer-engine-non-cuda": "0.3.13", "nixl-of-another-name": "1"}
    assert [(check.name, check.detail) for check in version_checks(versions)] == [
        ("mooncake", "mooncake-transfer-engine-non-cuda 0.3.13")
    ]


# Settings
def checks_of(root: Path, environ: Mapping[str, str], gpus: int = 8) -> dict[str, Check]:
    found = settings_checks(Machine.at(root, gpus, hgx.ADDRESSES), environ)
    assert all(check.fix for check in found if check.status != "ok")
    return {check.name: check for check in found}


GOOD = {
    "UCX_TLS": "rc,cuda_copy,cuda_ipc,sm", "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1", "UCX_MAX_RMA_RAILS": "2",
    "NCCL_IB_HCA": "=mlx5_0,mlx5_1", "NCCL_SOCKET_IFNAME": "bond", "GLOO_SOCKET_IFNAME": "bond0",
    "MC_GID_INDEX": "3", "NCCL_IB_GID_INDEX": "3", "MC_FORCE_HCA": "1", "MC_TRANSFER_TIMEOUT": "30",
    "MC_TCP_BIND_ADDRESS": "10.0.0.1", "MC_MTU": "4096", "UCX_LOG_LEVEL": "warn",
}  # fmt: skip


@pytest.mark.parametrize(
    "environ",
    [
        {},
        GOOD,
        {"UCX_TLS": "all", "UCX_NET_DEVICES": "all"},
        {"UCX_TLS": "^tcp", "UCX_NET_DEVICES": "mlx5_[0-3]:1", "NCCL_IB_HCA": "^mlx5_9"},
        {"UCX_TLS": "dc_x,cuda", "NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "=bond0"},
    ],
)
def test_sound_settings_are_let_alone(root: Path, environ: dict[str, str]) -> None:
    (check,) = checks_of(root, environ).values()
    assert (check.name, check.status) == ("settings", "ok")


@pytest.mark.parametrize(
    ("name", "value", "status", "expected"),
    [
        ("MC_FORCE_TCP", "1", "warn", "although there is RDMA"),
        ("NCCL_IB_DISABLE", "1", "warn", "although there is RDMA"),
        ("UCX_TLS", "tcp,cuda_copy", "warn", "leaves RDMA out"),
        ("UCX_TLS", "^ib", "warn", "leaves RDMA out"),
        ("UCX_TLS", "rc,sm", "warn", "leaves CUDA out"),
        ("UCX_NET_DEVICES", "mlx5_0:1,mlx5_77:1", "missing", "mlx5_77:1 is not here"),
        ("UCX_NET_DEVICES", "mlx5_4:1", "missing", "mlx5_4:1 has no link"),
        ("UCX_NET_DEVICES", "storage0", "missing", "storage0 has no link"),
        ("NCCL_IB_HCA", "=mlx5", "missing", "mlx5 is not here"),
        ("NCCL_SOCKET_IFNAME", "eth", "missing", "eth is not here"),
        ("GLOO_SOCKET_IFNAME", "bond", "missing", "bond is not here"),
        ("MC_GID_INDEX", "0", "warn", "IB/RoCE v1"),
        ("UCX_IB_GID_INDEX", "1", "warn", "link-local"),
        ("NCCL_IB_GID_INDEX", "9", "warn", "empty"),
        ("MC_TRANSFER_TIMEOUT", "2", "warn", "waits 5 s at least"),
        ("MC_TCP_BIND_ADDRESS", "10.9.9.9", "missing", "no interface has this address"),
        ("MC_CUSTOM_TOPO_JSON", "/no/such/file.json", "missing", "no such file"),
        ("UCX_LOG_LEVEL", "debug", "warn", "a line for each transfer"),
    ],
)
def test_each_bad_setting_is_named(root: Path, name: str, value: str, status: str, expected: str) -> None:
    found = checks_of(root, {name: value})
    assert list(found) == [f"setting {name}"]
    assert found[f"setting {name}"].status == status
    assert expected in found[f"setting {name}"].detail


def test_fewer_rails_than_devices(root: Path) -> None:
    devices = ",".join(f"{name}:1" for name in hgx.NAMES)
    found = checks_of(root, {"UCX_NET_DEVICES": devices})["setting UCX_MAX_RMA_RAILS"]
    assert (found.status, found.fix) == ("warn", "UCX_MAX_RMA_RAILS=8")
    assert "is unset, and NIXL makes it 2" in found.detail
    assert list(checks_of(root, {"UCX_NET_DEVICES": devices, "UCX_MAX_RMA_RAILS": "8"})) == ["settings"]


def test_a_small_mtu_under_mooncakes_large_one(root: Path) -> None:
    (hgx.pci(root, "mlx5_1") / "net/rail1/mtu").write_text("1500\n")
    assert "rail1 carries less" in checks_of(root, {"MC_MTU": "4096"})["setting MC_MTU"].detail


def test_without_rdma_the_same_settings_mean_something_else(tmp_path: Path) -> None:
    assert list(checks_of(tmp_path, {"MC_FORCE_TCP": "1", "UCX_TLS": "tcp"}, gpus=0)) == ["settings"]
    assert checks_of(tmp_path, {"MC_FORCE_HCA": "1"}, 0)["setting MC_FORCE_HCA"].status == "missing"
    assert "unset NCCL_IB_HCA" in checks_of(tmp_path, {"NCCL_IB_HCA": "mlx5"}, 0)["setting NCCL_IB_HCA"].fix
