"""Which NICs are taken, in which order, and what each library is told: on a tree of a large machine."""

from pathlib import Path

import hgx
import pytest

from kvbench.errors import InputError
from kvbench.hosts.devices import rdma
from kvbench.hosts.nics.choice import (
    Found,
    MemoryPlace,
    Nic,
    choose,
    distance,
    find,
    in_order,
    own_addresses,
    place_of,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return hgx.machine(tmp_path)


def rdma_nics(root: Path) -> Found:
    return find("rdma", root, hgx.ADDRESSES)


def names(nics: list[Nic]) -> list[str]:
    return [nic.name for nic in nics]


def test_the_storage_ports_are_left_out_and_said_why(root: Path) -> None:
    found = rdma_nics(root)
    assert tuple(nic.name for nic in found.usable) == hgx.NAMES
    assert found.left_out == dict.fromkeys(hgx.STORAGE, "its port is DOWN (Disabled)")


def test_what_is_known_of_a_nic(root: Path) -> None:
    nic = rdma_nics(root).usable[5]
    assert nic == Nic(
        name="mlx5_6", kind="rdma", address="10.0.5.1", gbit_per_s=400.0, gid_index=3,
        link_layer="Ethernet", interface="rail5", pci_address=hgx.nic_address(5), numa_node=1,
    )  # fmt: skip
    assert nic.to_json()["address"] == "10.0.5.1"
    assert str(nic) == "mlx5_6 (400 Gbit/s, NUMA node 1)"


def test_readings_of_a_device(root: Path) -> None:
    device = rdma(root)[0]
    assert device["interfaces"] == ["rail0"]
    assert device["virtual_function"] is False
    assert device["pcie"] == {
        "current_gt_per_s": 32.0, "current_width": 16, "max_gt_per_s": 32.0, "max_width": 16,
    }  # fmt: skip
    assert device["ports"][0]["phys_state"] == "LinkUp"


@pytest.mark.parametrize("gpu", range(8))
def test_the_nic_behind_the_gpus_own_switch_comes_first(root: Path, gpu: int) -> None:
    place = place_of(f"gpu:{gpu}", root, hgx.CARDS)
    assert place == MemoryPlace(gpu // 4, hgx.gpu_address(gpu))
    ordered = names(choose(8, rdma_nics(root), place, root))
    assert ordered[0] == hgx.NAMES[gpu]
    first, other = hgx.NAMES[:4], hgx.NAMES[4:]
    assert set(ordered[:4]) == set(first if gpu < 4 else other)


def test_distances_are_those_of_nvidia_smi_topo(root: Path) -> None:
    place = place_of("gpu:0", root, hgx.CARDS)
    by_name = {nic.name: distance(nic, place, root)[0] for nic in rdma_nics(root).usable}
    assert by_name["mlx5_0"] == 0
    assert {by_name[name] for name in hgx.NAMES[1:4]} == {2}
    assert {by_name[name] for name in hgx.NAMES[4:]} == {3}


def test_a_place_may_be_a_numa_node_or_a_pci_address(root: Path) -> None:
    found = rdma_nics(root).usable
    assert names(in_order(found, place_of("numa:1", root), root))[:4] == list(hgx.NAMES[4:])
    assert place_of(hgx.gpu_address(6).upper(), root) == MemoryPlace(1, hgx.gpu_address(6))
    assert names(in_order(found, MemoryPlace(None), root)) == list(hgx.NAMES)
    for text, message in (("gpu:9", "no GPU 9"), ("left", "is not a location")):
        with pytest.raises(InputError, match=message):
            place_of(text, root, hgx.CARDS)


def test_a_slower_nic_comes_last_however_near(root: Path) -> None:
    (hgx.device(root, "mlx5_0") / "rate").write_text("100 Gb/sec (4X EDR)\n")
    assert names(choose(8, rdma_nics(root), place_of("gpu:0", root, hgx.CARDS), root))[-1] == "mlx5_0"


@pytest.mark.parametrize("count", [9, 0, -1])
def test_more_than_there_are_is_refused_with_all_that_there_are(root: Path, count: int) -> None:
    with pytest.raises(InputError) as caught:
        choose(count, rdma_nics(root))
    assert "8 usable here" in caught.value.message
    assert all(name in caught.value.message for name in hgx.NAMES)
    assert "mlx5_4: its port is DOWN (Disabled)" in caught.value.hint


def test_virtual_functions_and_bonds_are_left_out(root: Path) -> None:
    (hgx.pci(root, "mlx5_1") / "physfn").mkdir()
    hgx.link(root / "sys/class/net/rail2/master", root / "sys/devices/virtual/net/bond0")
    for gid in (hgx.device(root, "mlx5_3") / "gids").iterdir():
        gid.write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    left_out = rdma_nics(root).left_out
    assert left_out["mlx5_1"] == "a virtual function"
    assert left_out["mlx5_2"] == "part of a bond (bond0): one name, several cables"
    assert left_out["mlx5_3"] == "it has no GID"


def test_a_gid_is_chosen_that_a_router_passes_on(root: Path) -> None:
    gids = hgx.device(root, "mlx5_0") / "gids"
    (gids / "3").write_text("2001:0db8:0000:0000:0000:0000:0000:0001\n")
    assert (rdma_nics(root).usable[0].gid_index, rdma_nics(root).usable[0].address) == (3, "10.0.0.1")
    (gids / "3").unlink()
    assert rdma_nics(root).usable[0].gid_index == 1  # link-local, but RoCE v2
    (gids / "1").unlink()
    assert rdma_nics(root).usable[0].gid_index == 0


def test_infiniband_takes_the_ports_own_gid(root: Path) -> None:
    (hgx.device(root, "mlx5_0") / "link_layer").write_text("InfiniBand\n")
    assert rdma_nics(root).usable[0].gid_index == 0


def test_interfaces_for_tcp(root: Path) -> None:
    found = find("tcp", root, hgx.ADDRESSES)
    usable = {nic.name: nic for nic in found.usable}
    assert set(usable) == {f"rail{number}" for number in range(8)} | {"bond0"}
    assert (usable["rail3"].address, usable["rail3"].gbit_per_s) == ("10.0.3.1", 400.0)
    assert names(in_order(found.usable, root=root))[-1] == "bond0"
    assert found.left_out == {
        "lo": "the loopback", "docker0": "a bridge of containers or virtual machines",
        "veth12ab": "one end of a virtual pair (veth)",
        "dummy0": "a virtual interface with no hardware below", "tun0": "a tunnel",
        "storage0": "its link is down", "storage1": "its link is down",
    }  # fmt: skip


def test_an_interface_without_address_or_in_a_bond_is_left_out(root: Path) -> None:
    hgx.link(root / "sys/class/net/rail2/master", root / "sys/devices/virtual/net/bond0")
    (hgx.pci(root, "mlx5_1") / "net/rail1/device/physfn").mkdir()
    left_out = find("tcp", root, {**hgx.ADDRESSES, "rail0": []}).left_out
    assert (left_out["rail0"], left_out["rail1"]) == ("it has no IP address", "a virtual function")
    assert left_out["rail2"] == "part of bond0"


def test_in_a_lab_the_pairs_count_and_their_made_up_speed_does_not(root: Path) -> None:
    hgx.write(root, {"sys/devices/virtual/net/veth12ab/speed": "10000"})
    found = find("tcp", root, {"veth12ab": ["10.77.0.1"]}, in_lab=True)
    assert [(nic.name, nic.gbit_per_s) for nic in found.usable] == [("veth12ab", None)]


def test_this_machine() -> None:
    assert "127.0.0.1" in own_addresses()["lo"]
    for nic in find("tcp").usable:
        assert nic.address in own_addresses()[nic.name]


def test_each_nic_has_a_gid_index_of_its_own(root: Path) -> None:
    (hgx.device(root, "mlx5_0") / "gids/3").unlink()
    assert [nic.gid_index for nic in choose(2, rdma_nics(root))] == [1, 3]
