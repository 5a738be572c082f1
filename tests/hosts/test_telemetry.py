"""Metrics pages: parsing, growth, and what is missing."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from kvbench.core.gates.evidence import EngineFigures
from kvbench.errors import ServerError
from kvbench.hosts.devices import NicReading, cgroup_throttled_s, link_rate, nic_counters, thermal_events
from kvbench.hosts.nvml import energy_j, names, nvlink_bytes, slowed_s
from kvbench.hosts.telemetry import (
    HostReading,
    Metrics,
    Sampler,
    difference,
    host_figures,
    parse_metrics,
    quantile,
    read_host,
    scrape,
)
from kvbench.sweep.trial.evidence import engine_figures, router_figures, transport_of, with_slots
from kvbench.sweep.trial.readings import Readings, join_hosts

BEFORE = """
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{model_name="tiny"} 100
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="tiny"} 3
"""
AFTER = """
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{model_name="tiny"} 350
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{model_name="tiny",source="local_compute"} 40
vllm:prompt_tokens_by_source_total{model_name="tiny",source="external_kv_transfer"} 210
# TYPE kvbench:transport_info gauge
kvbench:transport_info{transport="tcp",library="mooncake"} 1
"""


def test_growth_by_name_and_label() -> None:
    before, after = parse_metrics(BEFORE), parse_metrics(AFTER)
    assert difference(before, after, "vllm:prompt_tokens_total") == 250
    assert difference(before, after, "vllm:prompt_tokens_by_source_total", source="local_compute") == 40
    assert difference(before, after, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") is None
    assert difference(None, after, "vllm:prompt_tokens_total") is None
    assert difference(before, after, "vllm:unheard_of") is None


def test_the_short_way_reads_what_the_library_reads() -> None:
    page = """# HELP a_total {of} "what"
# TYPE a_total counter
a_total{engine="0",le="+Inf"} 12.0
a_total 1e-05

# TYPE b gauge
b{} -Inf
"""
    library = parse_metrics(f"{page}# EOF\n")
    assert parse_metrics(page) == library
    assert library.samples["a_total"] == [({"engine": "0", "le": "+Inf"}, 12.0), ({}, 1e-05)]
    for line in ('b{x="1" y="2"} 1', 'b{x="1",x="2"} 1', "b 1.2.3", "# TYPE b nothing"):
        with pytest.raises(ServerError):
            parse_metrics(page + line)


def test_a_page_that_is_none_is_an_error() -> None:
    with pytest.raises(ServerError):
        parse_metrics("<html>not { metrics</html>")


def test_a_server_that_is_not_there_is_a_gap_and_no_failure() -> None:
    with httpx.Client() as client:
        assert scrape(client, "http://127.0.0.1:9/metrics") is None
        assert scrape(client, "") is None


def test_figures_are_summed_by_role() -> None:
    before, after = parse_metrics(BEFORE), parse_metrics(AFTER)
    figures = engine_figures(
        {"decode-0": before, "decode-1": before, "prefill-0": None, "router": before},
        {"decode-0": after, "decode-1": after, "prefill-0": after, "router": after},
    )
    assert list(figures) == ["decode"]
    assert figures["decode"].prompt_tokens == 500
    assert figures["decode"].prompt_tokens_by_source == {"local_compute": 80, "external_kv_transfer": 420}
    assert figures["decode"].kv_bytes is None
    assert isinstance(figures["decode"], EngineFigures)


def test_transport_is_what_the_engines_say() -> None:
    assert transport_of({"prefill-0": parse_metrics(AFTER), "decode-0": Metrics(), "x": None}) == "tcp"


def test_the_sampler_sees_the_machine_and_this_process() -> None:
    with Sampler("t1", {"me": os.getpid(), "gone": 2**22 + 1}, {}) as sampler:
        deadline = time.monotonic() + 10
        while not sampler.rows and time.monotonic() < deadline:
            time.sleep(0.05)
    sources = {row["source"] for row in sampler.rows}
    assert {"host", "me"} <= sources
    assert "gone" not in sources
    assert all(row["trial_id"] == "t1" for row in sampler.rows)


HISTOGRAM = """
# TYPE lag histogram
lag_bucket{{le="0.001"}} {0}
lag_bucket{{le="0.01"}} {1}
lag_bucket{{le="+Inf"}} {2}
lag_sum 1
lag_count {2}
"""


def test_a_quantile_is_of_what_was_counted_in_between() -> None:
    before = parse_metrics(HISTOGRAM.format(1000, 1000, 1000))
    after = parse_metrics(HISTOGRAM.format(1050, 1100, 1100))
    assert quantile(before, after, "lag", 0.5) == 0.001
    assert quantile(before, after, "lag", 0.99) == 0.01
    assert quantile(after, after, "lag", 0.99) is None
    assert quantile(None, after, "lag", 0.99) is None


def test_own_work_is_told_from_that_of_others() -> None:
    before = read_host()
    deadline = time.process_time() + 0.3
    while time.process_time() < deadline:
        pass
    after = read_host()
    assert after.run_cpu_s - before.run_cpu_s >= 0.25
    assert after.cpu_s - before.cpu_s >= 0.25
    assert before.load_average >= 0


def written(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


PORT = "sys/class/infiniband/mlx5_0/ports"
COUNTERS = {
    "sys/class/net/ens1/statistics/tx_bytes": "1000\n", "sys/class/net/ens1/statistics/rx_bytes": "2000\n",
    "sys/class/net/ens1/speed": "400000\n", "sys/class/net/lo/statistics/tx_bytes": "5\n",
    "sys/class/net/lo/statistics/rx_bytes": "5\n", "sys/class/net/lo/type": "772\n",
    "sys/class/net/down0/operstate": "down\n", f"{PORT}/1/counters/port_xmit_data": "250\n",
    f"{PORT}/1/counters/port_rcv_data": "500\n", f"{PORT}/1/rate": "400 Gb/sec (4X NDR)\n",
    f"{PORT}/2/counters/port_xmit_data": "1\n", f"{PORT}/2/counters/port_rcv_data": "2\n",
    f"{PORT}/2/rate": "100 Gb/sec (4X EDR)\n", "sys/class/infiniband/odd/ports/1/rate": "?\n",
    "sys/class/infiniband/rdmap0s6/ports/1/hw_counters/tx_bytes": "7000\n",
    "sys/class/infiniband/rdmap0s6/ports/1/hw_counters/rx_bytes": "9000\n",
    "sys/class/infiniband/rdmap0s6/ports/1/hw_counters/rdma_read_bytes": "6000\n",
    "sys/class/infiniband/rdmap0s6/ports/1/rate": "200 Gb/sec (4X HDR)\n",
    "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "3\n",
    "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "4\n",
    "sys/devices/system/cpu/cpu1/thermal_throttle/package_throttle_count": "1\n",
    "proc/self/cgroup": "0::/pods/one\n",
    "sys/fs/cgroup/pods/one/cpu.stat": "usage_usec 9\nthrottled_usec 1500000\n",
    "sys/fs/cgroup/pods/cpu.stat": "throttled_usec 2500000\n",
}  # fmt: skip


def test_counters_of_another_machine(tmp_path: Path) -> None:
    root = written(tmp_path, COUNTERS)
    assert nic_counters(root) == {
        "lo": NicReading("ip", 5, 5, None, loopback=True),
        "ens1": NicReading("ip", 1000, 2000, 50e9),
        "mlx5_0": NicReading("rdma", 1004, 2008, 62.5e9),  # words of four bytes, two ports
        "rdmap0s6": NicReading("rdma", 7000, 9000, 25e9),  # an EFA's: bytes, under other names
    }
    assert thermal_events(root) == 8
    assert cgroup_throttled_s(root) == 2.5  # the limit above binds as well
    assert link_rate("2.5 Gb/sec") == 312.5e6
    assert link_rate(None) is None
    empty = tmp_path / "empty"
    assert (nic_counters(empty), thermal_events(empty), cgroup_throttled_s(empty)) == ({}, None, None)


def test_loopback_traffic_shows_in_its_counters() -> None:
    before = read_host()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as out,
    ):
        into, _ = server.accept()
        with into:
            for _ in range(40):
                out.sendall(bytes(50_000))
                left = 50_000
                while left:
                    left -= len(into.recv(left))
    figures = host_figures(before, read_host())
    assert figures.nics["lo"].loopback
    assert figures.nics["lo"].most_bytes >= 2e6
    assert figures.nics["lo"].bytes_per_s is None


def test_what_the_machine_withheld_is_told_as_shares() -> None:
    before = HostReading(0.5, 0, 0, 0, 10.0, {}, 1.0, 7, {"GPU 0 (heat)": 1.0, "GPU 1 (power)": 2.0})
    after = HostReading(0.5, 0, 0, 0, 20.0, {}, 1.5, 9, {"GPU 0 (heat)": 3.0, "GPU 1 (power)": 2.05})
    figures = host_figures(before, after)
    assert (figures.throttled_share, figures.thermal_events) == (0.05, 2)
    assert figures.gpu_slowdowns == ("GPU 0 (heat) for 20% of the time",)


def test_power_is_the_energy_between_two_readings() -> None:
    before = HostReading(0.5, 0, 0, 0, 10.0, gpu_energy_j={"0": 500.0, "GPU-a": 500.0, "1": 900.0})
    after = HostReading(0.5, 0, 0, 0, 20.0, gpu_energy_j={"0": 4500.0, "GPU-a": 4500.0, "1": 3.0, "2": 8.0})
    figures = host_figures(before, after)
    assert figures.gpu_watts == {"0": 400.0, "GPU-a": 400.0}  # the second one's driver was loaded anew
    assert join_hosts({"a": figures, "b": figures}).gpu_watts["b/0"] == 400.0
    known = Readings({}, {}, {}, (), figures, gpus=("GPU-a", "0"))
    assert (known.gpu_watts, known.watts) == ({"GPU-a": 400.0, "0": 400.0}, 800.0)
    for some in ((), ("0", "2")):
        lacking = Readings({}, {}, {}, (), figures, gpus=some)
        assert (lacking.gpu_watts, lacking.watts) == ({}, None)


def test_slots_are_seen_where_others_wait() -> None:
    def rows(name: str, *samples: tuple[int, int]) -> list[dict[str, object]]:
        return [
            {"t_s": t, "source": name, "metric": f"vllm:num_requests_{word}", "value": float(value)}
            for t, pair in enumerate(samples)
            for word, value in zip(("running", "waiting"), pair, strict=True)
        ]

    seen = rows("decode-0", (1, 0), (4, 2), (4, 5), (3, 1), (4, 9)) + rows("decode-1", (2, 0), (2, 3))
    figures = with_slots({"decode": EngineFigures(), "prefill": EngineFigures()}, seen, 64)
    decode = figures["decode"]
    assert (decode.running_peak, decode.queued_samples, decode.full_samples, decode.slots) == (4, 5, 4, 64)
    assert figures["prefill"].running_peak is None


def test_a_restart_shows_by_the_start_time() -> None:
    def page(started: float) -> Metrics:
        return parse_metrics(
            f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {started}\n"
        )

    figures = engine_figures(
        {"decode-0": page(1), "decode-1": page(5)}, {"decode-0": page(1), "decode-1": page(9)}
    )
    assert figures["decode"].restarts == 1
    assert engine_figures({"decode-0": Metrics()}, {"decode-0": Metrics()})["decode"].restarts is None


ROUTER = """
# TYPE kvbench:router_processes gauge
kvbench:router_processes 2
# TYPE kvbench:router_cpu_seconds counter
kvbench:router_cpu_seconds_total{{process="0"}} {0}
kvbench:router_cpu_seconds_total{{process="1"}} {1}
"""


def test_the_busiest_process_of_a_router_counts() -> None:
    before, after = parse_metrics(ROUTER.format(1, 1)), parse_metrics(ROUTER.format(2, 5))
    figures = router_figures({"router": before}, {"router": after})
    assert (figures.cpu_s, figures.processes, figures.loop_lag_p99_s) == (4, 2, None)
    assert router_figures({}, {"router": after}).cpu_s is None


NVML = """
typedef struct {{
  unsigned field, scope; long long time, latency; int kind, ret; unsigned long long v;
}} field_t;
int nvmlDeviceGetFieldValues(void *h, int n, field_t *f) {{
  for (int i = 0; i < n; i++) {{ f[i].ret = (long)h == 2 || f[i].scope != -1u; f[i].v = f[i].field; }}
  return 0;
}}
typedef struct {{ unsigned long long reference, violation; }} violation_t;
int nvmlInit_v2(void) {{ return {init}; }}
int nvmlDeviceGetCount_v2(unsigned *n) {{ *n = 2; return 0; }}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) {{ *h = (void *)(long)(i + 1); return 0; }}
int nvmlDeviceGetName(void *h, char *s, unsigned n) {{ s[0] = 'H'; s[1] = '0' + (long)h; return s[2] = 0; }}
int nvmlDeviceGetViolationStatus(void *h, int policy, violation_t *t) {{
  t->reference = 9; t->violation = (long)h * 1000000000ull + policy; return (long)h == 2 && policy == 1;
}}
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) {{
  *mj = 5000000000000ull + (long)h; return (long)h == 2 ? 3 : 0;
}}
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) {{ s[0] = 'U'; s[1] = '0' + (long)h; return s[2] = 0; }}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to build a driver's library")
def test_gpus_are_asked_through_the_driver_s_library(tmp_path: Path) -> None:
    def built(name: str, init: int) -> str:
        (tmp_path / f"{name}.c").write_text(NVML.format(init=init))
        command = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / name), str(tmp_path / f"{name}.c")]
        subprocess.run(command, check=True, timeout=60)
        return str(tmp_path / name)

    library = built("nvml.so", 0)
    assert slowed_s(library) == {"GPU 0 (power)": 1.0, "GPU 0 (heat)": 1.000000001, "GPU 1 (power)": 2.0}
    assert names(library) == ["H1", "H2"]
    assert nvlink_bytes(library) == {0: (138 * 1024, 139 * 1024)}  # the second has no such links
    # More than 32 bits hold; the second, as one before Volta, says that it is not supported.
    assert energy_j(library) == {"0": 5e9 + 0.001, "U1": 5e9 + 0.001}
    assert (slowed_s(built("dead.so", 9)), names(built("dead.so", 9))) == ({}, [])


def test_without_the_driver_s_library_nothing_is_known_of_gpus(tmp_path: Path) -> None:
    absent = str(tmp_path / "libnvidia-ml.so.1")
    assert (slowed_s(absent), names(absent), nvlink_bytes(absent), energy_j(absent)) == ({}, [], {}, {})
