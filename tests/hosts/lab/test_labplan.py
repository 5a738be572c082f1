"""A lab's shape, without making one: rates, bursts, names, and what is left over or not allowed."""

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import InputError, LabError
from kvbench.hosts.lab import state as labstate
from kvbench.hosts.lab.hosts import Host, LabProcess, may_use_netns, remedy, tool
from kvbench.hosts.lab.layout import LabPlan, ip_lines, parse_rate, parse_share, shape_line
from kvbench.hosts.lab.state import Fault, LabState


@pytest.mark.parametrize(
    ("text", "bits"),
    [("1gbit", 1e9), ("300mbit", 3e8), ("2.5Gbit/s", 2.5e9), (" 1000 kbit ", 1e6), ("5000000bit", 5e6)],
)
def test_rates_as_tc_writes_them(text: str, bits: float) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "1", "1gb", "-1gbit", "0gbit", "2tbit", "1gbit; reboot"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(InputError, match="not a NIC's rate"):
        parse_rate(text)


@given(st.floats(min_value=1e-4, max_value=100))
def test_shares_are_percentages(percent: float) -> None:
    assert parse_share(f"{percent}%") == pytest.approx(percent / 100)


@pytest.mark.parametrize("text", ["", "1", "0%", "101%", "-1%", "many%", "nan%", "%"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(InputError, match="not a share"):
        parse_share(text)


@given(st.integers(min_value=1, max_value=1_000_000))
def test_a_burst_is_small_but_enough(mbit: int) -> None:
    plan = LabPlan(rate=f"{mbit}mbit")
    seconds = plan.burst_bytes * 8 / plan.bits_per_s
    assert plan.burst_bytes >= 65_536
    assert seconds >= 0.002
    assert plan.burst_bytes == 65_536 or seconds <= 0.004


def test_bursts_that_were_measured_to_reach_their_rate() -> None:
    bursts = {rate: LabPlan(rate=rate).burst_bytes for rate in ("200mbit", "1gbit", "5gbit", "10gbit")}
    assert bursts == {"200mbit": 64 << 10, "1gbit": 256 << 10, "5gbit": 2 << 20, "10gbit": 4 << 20}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nics": 0}, "1 to 64"),
        ({"nics": 65}, "1 to 64"),
        ({"mtu": 100}, "MTU of 100"),
        ({"rate": "much"}, "not a NIC's rate"),
        ({"name": "../x"}, "cannot be a lab's name"),
        ({"name": ""}, "cannot be a lab's name"),
        ({"name": "a" * 33}, "cannot be a lab's name"),
        ({"prefix": "10.77.1"}, "not the beginning"),
        ({"prefix": "10.300"}, "not the beginning"),
        ({"prefix": "127.0"}, "not the beginning"),
    ],
)
def test_shapes_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LabPlan(**given)


def test_what_a_plan_says() -> None:
    plan = LabPlan("kv", 8, "1gbit")
    assert plan.describe() == "8 × 1gbit"
    assert replace(plan, mtu=9000).describe() == "8 × 1gbit, MTU 9000"
    assert plan.line_rate_gb_per_s == 0.125
    assert (plan.address("A", 7), plan.address("B", 7)) == ("10.77.7.1", "10.77.7.2")
    assert all(len(plan.interface(nic)) <= 15 for nic in range(64))


def test_more_than_the_cores_carry_is_said() -> None:
    assert LabPlan(nics=8, rate="1gbit").overload(2) == ""
    assert LabPlan(nics=2, rate="5gbit").overload(2) == ""
    assert "up to 2.5gbit each is safe" in LabPlan(nics=4, rate="5gbit").overload(2)


def test_the_lines_of_ip_and_tc() -> None:
    plan = LabPlan(nics=2, rate="300mbit", mtu=9000)
    first, second = (ip_lines(plan, side, "4711", "cubic") for side in ("A", "B"))
    assert "link add nic1 mtu 9000 type veth peer name nic1 mtu 9000 netns 4711" in first
    assert not any("veth" in line for line in second)
    assert "route replace 10.77.1.0/24 dev nic1 src 10.77.1.2 congctl cubic" in second
    assert not any("congctl" in line for line in ip_lines(plan, "A", "4711", None))
    assert shape_line(plan, 1) == ("qdisc add dev nic1 root tbf rate 300000000bit burst 131072 latency 20ms")


# Files and processes
@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_state_comes_back_as_it_was(runtime: Path) -> None:
    me = LabProcess.of(os.getpid())
    hosts = {side: Host(side, f"kvbench-x-{side}", me, own_sysfs=False) for side in ("A", "B")}
    faults = [Fault("loss", 1, "1%", 7)]
    state = LabState(LabPlan("x", 3), hosts, me, True, "cubic", "6.1", "now", ["slow"], faults)
    state.save()
    assert (labstate.load("x"), labstate.all_states()) == (state, [state])
    assert state.standing
    assert not state.left_over


def test_the_folder_is_the_users_own(runtime: Path) -> None:
    assert labstate.folder() == runtime / "kvbench/labs"
    assert stat.S_IMODE((runtime / "kvbench").stat().st_mode) == 0o700
    (runtime / "kvbench").chmod(0o777)
    labstate.folder()
    assert stat.S_IMODE((runtime / "kvbench").stat().st_mode) == 0o700


def test_a_folder_that_leads_elsewhere_is_refused(runtime: Path) -> None:
    (runtime / "other").mkdir()
    (runtime / "kvbench").symlink_to("other")
    with pytest.raises(LabError, match="not this user's folder"):
        labstate.folder()


def test_a_damaged_or_newer_file_counts_as_none(runtime: Path) -> None:
    for text in ("", "{", "[]", '{"schema": 99}', '{"schema": 1}'):
        (labstate.folder() / "x.json").write_text(text)
        assert labstate.load("x") is None
        assert labstate.all_states() == []


def test_a_lab_whose_owner_is_gone_is_left_over() -> None:
    me = LabProcess.of(os.getpid())
    hosts = {side: Host(side, f"kvbench-x-{side}", me) for side in ("A", "B")}
    reused = LabProcess(os.getpid(), me.started - 1)  # the same number, an earlier process
    assert LabState(LabPlan("x"), hosts, reused, True).left_over
    assert not LabState(LabPlan("x"), hosts, None, True).left_over
    gone = {side: replace(host, holder=reused) for side, host in hosts.items()}
    assert LabState(LabPlan("x"), gone, None, True).left_over


def test_a_missing_tool_is_named_with_its_package() -> None:
    with pytest.raises(LabError) as caught:
        tool("no-such-tool")
    assert caught.value.hint == "install the package no-such-tool"


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
        ("kernel/unprivileged_userns_clone", "0", "unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "apparmor_restrict_unprivileged_userns=0"),
        ("kernel/ostype", "Linux", "--privileged"),
    ],
)
def test_what_forbids_namespaces_is_named(tmp_path: Path, name: str, value: str, fix: str) -> None:
    path = tmp_path / "proc/sys" / name
    path.parent.mkdir(parents=True)
    path.write_text(value + "\n")
    assert fix in remedy(tmp_path)


def test_a_process_without_capabilities_makes_no_named_namespaces(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    assert not may_use_netns(tmp_path)
    (tmp_path / "proc/self/status").write_text("CapPrm:\t000001ffffffffff\nCapEff:\t0000000000001000\n")
    assert not may_use_netns(tmp_path)
    (tmp_path / "proc/self/status").write_text("CapEff:\t0000000000201000\n")
    assert may_use_netns(tmp_path) is (os.geteuid() == 0)
