"""The description of a machine: recorded trees of other machines, and this one."""

import json
import os
import subprocess
from pathlib import Path

import hgx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.hosts.devices import gpus, nics, output_of, rdma
from kvbench.hosts.environment import (
    ENV_PREFIXES,
    SECRET_WORDS,
    WITHHELD,
    attempt,
    cgroup_cpu_limit,
    describe,
    git_state,
    load_average,
    recorded_env,
)
from kvbench.hosts.gpu_affinity import affinity_text, topologies, with_affinity
from kvbench.version import __version__

PCI = "sys/devices/pci0000:15/0000:15:01.0/0000:18:00.0"
ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
ROCE_GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"

SERVER = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Xeon 8480C\n\nprocessor\t: 1\nmodel name\t: Xeon 8480C\n",
    "proc/meminfo": "MemTotal:       2113513540 kB\nMemAvailable:   2000000000 kB\n",
    "proc/loadavg": "0.50 1.25 2.00 3/1200 4242\n", "proc/sys/kernel/hostname": "gpu-7\n",
    "proc/sys/kernel/osrelease": "6.8.0-40-generic\n", "proc/self/cgroup": "0::/kubepods/pod1\n",
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n',
    "sys/fs/cgroup/kubepods/cpu.max": "800000 100000\n",
    "sys/fs/cgroup/kubepods/pod1/cpu.max": "max 100000\n", "sys/devices/system/node/node0/cpulist": "0\n",
    "sys/devices/system/node/node1/cpulist": "1\n", "sys/devices/system/node/possible": "0-1\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave\n", f"{PCI}/numa_node": "1\n",
    f"{PCI}/net/ens1/speed": "400000\n", f"{PCI}/net/ens1/operstate": "up\n",
    f"{PCI}/net/ens1/mtu": "9000\n", f"{PCI}/infiniband/mlx5_0/fw_ver": "28.39.1002\n",
    f"{PCI}/infiniband/mlx5_0/board_id": "MT_0000000838\n",
    f"{PCI}/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    f"{PCI}/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    f"{PCI}/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
    f"{PCI}/infiniband/mlx5_0/ports/1/gids/0": f"{ZERO_GID}\n",
    f"{PCI}/infiniband/mlx5_0/ports/1/gids/3": f"{ROCE_GID}\n",
    f"{PCI}/infiniband/mlx5_0/ports/1/gid_attrs/types/3": "RoCE v2\n",
    f"{PCI}/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/3": "ens1\n",
    "sys/devices/virtual/net/lo/operstate": "unknown\n", "sys/class/net/bonding_masters": "\n",
}  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """The files of a machine with one RoCE NIC, as sysfs and procfs show them."""
    for name, text in SERVER.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for kind, name in (("net", "ens1"), ("infiniband", "mlx5_0")):
        (tmp_path / "sys/class" / kind).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/class" / kind / name).symlink_to(tmp_path / PCI / kind / name)
        (tmp_path / PCI / kind / name / "device").symlink_to("../..")
    (tmp_path / "sys/class/net/lo").symlink_to(tmp_path / "sys/devices/virtual/net/lo")
    (tmp_path / PCI / "driver").symlink_to("../../../../bus/pci/drivers/mlx5_core")
    return tmp_path


def test_a_recorded_server(server: Path) -> None:
    info = describe(server, environ={}, code=server)
    assert info["kvbench"] == __version__
    assert (info["hostname"], info["kernel"], info["os"]) == (
        "gpu-7",
        "6.8.0-40-generic",
        "Ubuntu 24.04.1 LTS",
    )
    assert info["cpu"] == {
        "model": "Xeon 8480C", "cores": 2, "usable_cores": None, "numa_nodes": {"node0": "0", "node1": "1"},
        "cgroup_limit": 8.0, "governor": "performance, powersave",
    }  # fmt: skip
    assert info["memory"] == {"total_bytes": 2113513540 * 1024, "available_bytes": 2_000_000_000 * 1024}
    assert info["load_average"] == [0.5, 1.25, 2.0]
    assert info["git"] is None


def test_nics(server: Path) -> None:
    by_name = {nic["name"]: nic for nic in nics(server)}
    assert set(by_name) == {"ens1", "lo"}
    assert by_name["ens1"] == {
        "name": "ens1", "speed_mbit": 400_000, "operstate": "up", "mtu": 9000, "driver": "mlx5_core",
        "pci_address": "0000:18:00.0", "numa_node": 1,
    }  # fmt: skip
    assert by_name["lo"]["pci_address"] is None
    assert by_name["lo"]["speed_mbit"] is None


def test_a_nic_without_link_has_no_speed(server: Path) -> None:
    (server / PCI / "net/ens1/speed").write_text("-1\n")
    assert [nic["speed_mbit"] for nic in nics(server)] == [None, None]


def test_rdma_devices(server: Path) -> None:
    (device,) = rdma(server)
    assert (device["name"], device["firmware"]) == ("mlx5_0", "28.39.1002")
    assert device["pci_address"] == "0000:18:00.0"
    (port,) = device["ports"]
    assert (port["port"], port["state"], port["link_layer"]) == (1, "ACTIVE", "Ethernet")
    assert port["gids"] == [{"index": 3, "gid": ROCE_GID, "type": "RoCE v2", "nic": "ens1"}]


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2.5),
    ],
)
def test_cgroup_limits(tmp_path: Path, files: dict[str, str], limit: float | None) -> None:
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cgroup_cpu_limit(tmp_path) == limit


def test_a_cgroup_path_that_climbs_out_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/../../../..\n")  # seen from inside a namespace
    assert cgroup_cpu_limit(tmp_path) is None


def test_an_empty_machine_is_all_null_and_raises_nothing(tmp_path: Path) -> None:
    info = describe(tmp_path, environ={}, code=tmp_path)
    assert info["hostname"] is info["os"] is info["kernel"] is info["git"] is info["load_average"] is None
    assert info["nics"] == info["rdma"] == []
    assert info["cpu"]["model"] is info["memory"]["total_bytes"] is None


def test_unreadable_files_are_null(server: Path) -> None:
    (server / "proc/sys/kernel/hostname").unlink()
    (server / "proc/sys/kernel/hostname").mkdir()
    (server / "proc/loadavg").write_bytes(b"\xff\xfe garbage")
    info = describe(server, environ={}, code=server)
    assert info["hostname"] is None
    assert info["load_average"] is None


def test_this_machine_in_json() -> None:
    info = json.loads(json.dumps(describe(), allow_nan=False))
    assert info["cpu"]["cores"] >= 1
    assert info["memory"]["total_bytes"] > 0
    assert "lo" in {nic["name"] for nic in info["nics"]}
    assert info["libraries"]["numpy"]
    assert load_average() == pytest.approx(info["load_average"], abs=50)


def test_attempt_costs_nothing_but_the_answer() -> None:
    assert attempt(lambda: 1) == 1
    assert attempt(lambda: 1 // 0) is None


# Settings
names = st.builds(
    lambda prefix, rest: prefix + rest,
    st.sampled_from([*ENV_PREFIXES, "", "HOME_", "AWS_"]),
    st.text("ABKEYTOKENSECRETPASSWORD_", max_size=20),
)


@given(st.dictionaries(names, st.just("hunter2")))
def test_no_secret_and_nothing_unlisted_is_recorded(environ: dict[str, str]) -> None:
    kept = recorded_env(environ)
    assert set(kept) == {name for name in environ if name.startswith(ENV_PREFIXES)}
    for name, value in kept.items():
        assert value == (WITHHELD if any(word in name for word in SECRET_WORDS) else "hunter2")


def test_logins_in_addresses_are_cut_out() -> None:
    kept = recorded_env({"MC_METADATA_SERVER": "http://me:pw@10.0.0.1:8080/x", "UCX_TLS": "tcp", "PATH": "/"})
    assert kept == {"MC_METADATA_SERVER": "http://10.0.0.1:8080/x", "UCX_TLS": "tcp"}


# Programs that are asked
def script(folder: Path, text: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_gpus_as_nvidia_smi_tells_them(tmp_path: Path) -> None:
    line = "0, NVIDIA H200, 143771, 580.95.05, 00000000:1B:00.0, P0"
    (gpu,) = gpus(script(tmp_path, f"echo '{line}'")) or []
    assert gpu == {
        "index": "0", "name": "NVIDIA H200", "driver_version": "580.95.05", "pstate": "P0",
        "memory_bytes": 143771 * 2**20, "pci_address": "00000000:1b:00.0",
    }  # fmt: skip


def test_no_gpu_and_no_answer_are_different(tmp_path: Path) -> None:
    assert gpus("no-such-nvidia-smi") == []
    assert gpus(script(tmp_path, "echo 'driver mismatch' >&2; exit 18")) is None
    assert gpus(script(tmp_path, "exec sleep 30"), deadline_s=0.2) is None


def test_output_of_an_absent_program() -> None:
    assert output_of(["no-such-command-here"], 5) is None


def test_git_state(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = {
            f"GIT_{role}_{what}": "x@y.z" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        }
        command = ["git", "-C", str(tmp_path), *arguments]
        env = {**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull}
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=30).stdout

    assert git_state(tmp_path) is None
    git("init", "-q")
    assert git_state(tmp_path) is None  # nothing committed yet
    (tmp_path / "code.py").write_text("1\n")
    git("add", "code.py")
    git("commit", "-q", "-m", "first")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD").strip(), "dirty": False}
    (tmp_path / "notes.txt").write_text("untracked files are no change of the code\n")
    assert (git_state(tmp_path) or {})["dirty"] is False
    (tmp_path / "code.py").write_text("2\n")
    assert (git_state(tmp_path) or {})["dirty"] is True


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return hgx.machine(tmp_path)


def test_sysfs_alone(node: Path) -> None:
    cards = with_affinity(hgx.CARDS, node, "")
    assert [card["numa_node"] for card in cards] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [card["nearest_nics"] for card in cards] == [[name] for name in hgx.NAMES]
    assert {card["nic_way"] for card in cards} == {"PIX/PXB"}
    assert affinity_text(cards[4]) == "NUMA node 1; nearest RDMA mlx5_5 (PIX/PXB)"


def test_nvidia_smi_alone_as_in_a_container_that_hides_the_tree(tmp_path: Path) -> None:
    cards = with_affinity(hgx.CARDS, tmp_path, hgx.topology())
    assert [card["numa_node"] for card in cards] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [card["nearest_nics"] for card in cards] == [[name] for name in hgx.NAMES]
    assert affinity_text(cards[0]) == "NUMA node 0; nearest RDMA mlx5_0 (PXB); NVLink to 7 GPUs (NV18)"


def test_both_agree_of_that_machine(node: Path) -> None:
    rows = topologies(hgx.topology())
    assert list(rows) == [str(number) for number in range(8)]
    assert set(rows["0"].nics) == {*hgx.NAMES, *hgx.STORAGE}
    by_sysfs = with_affinity(hgx.CARDS, node, "") or []
    by_both = with_affinity(hgx.CARDS, node, hgx.topology()) or []
    for card, both in zip(by_sysfs, by_both, strict=True):
        row = rows[card["index"]]
        assert row.numa_node == card["numa_node"]
        (nearest,) = card["nearest_nics"]
        assert row.nics[nearest] == "PXB"
        assert list(row.nics.values()).count("PXB") == 1
        assert {**both, "nvlink": {}} == card
        assert len(both["nvlink"]) == 7


def test_gpus_without_nvlink_or_nics_and_texts_of_another_form(tmp_path: Path) -> None:
    plain = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tPIX\t0-47\t0\t\tN/A\n"
    cards = with_affinity(hgx.CARDS[:2], tmp_path, plain)
    assert affinity_text(cards[0]) == "NUMA node 0"
    assert affinity_text(cards[1]) == "NUMA node unknown"
    assert topologies("nvidia-smi: command failed") == topologies("") == {}
    assert with_affinity([], tmp_path) == []
    assert with_affinity(None, tmp_path) is None
