"""A pass is measured again if the machine did other work meanwhile, and never for ever."""

from __future__ import annotations

from kvbench.core.gates.evidence import HostFigures
from kvbench.sweep.selftest import TRIES, disturbance, least_disturbed


def test_each_pass_has_a_name_and_each_further_one_a_reason() -> None:
    names: list[str] = []
    messages: list[str] = []

    def measure(name: str) -> int:
        names.append(name)
        return len(names) - 1

    calm = least_disturbed(measure, "work", messages.append)
    assert names == [f"work-{number}" for number in range(calm.tries)]
    assert 0 <= calm.found < calm.tries <= TRIES
    quiet = not disturbance(calm.host)
    assert len(messages) == (calm.tries - 1 if quiet else TRIES)
    assert all(text.startswith("work: ") for text in messages)


def test_what_took_the_cpu_is_said() -> None:
    assert disturbance(HostFigures()) == ""
    assert "stolen by the hypervisor" in disturbance(HostFigures(steal_share=0.2))
