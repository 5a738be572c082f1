"""Where GPUs sit, on the recorded node of eight: from sysfs, from `nvidia-smi topo -m`, and from both."""

from __future__ import annotations

from pathlib import Path

import hgx
import pytest

from kvbench.hosts.gpu_affinity import affinity_text, topologies, with_affinity


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return hgx.machine(tmp_path)


def test_sysfs_alone(node: Path) -> None:
    cards = with_affinity(hgx.CARDS, node, "")
    assert cards is not None
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
