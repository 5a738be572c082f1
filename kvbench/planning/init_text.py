"""The text of a new scenario: each choice with a comment on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvbench import engines
from kvbench.core.physics.model_shapes import MODELS, ModelShape
from kvbench.core.scenario.yaml_lines import one_line
from kvbench.planning.init_machine import Able, FoundMachine, first_scenario


@dataclass(frozen=True)
class Answers:
    """Everything that the file says."""

    engine: str
    model: str
    shape: ModelShape
    connectors: tuple[str, ...]
    input_len: tuple[int, ...]
    output_len: int
    ttft_ms: float
    tpot_ms: float


def described(machine: FoundMachine) -> list[str]:
    """What was found, a line each."""
    cards = [str(card.get("name")) for card in machine.gpus]
    lines = [f"GPUs      {', '.join(cards) or 'none'}", f"RDMA      {', '.join(machine.nics) or 'none'}"]
    for name in engines.names():
        first, there = engines.get(name).first_scenario, machine.installed(name)
        if first and first.title:
            where = f"{there.version} at {there.command}" if there.command else "none on the PATH"
            lines.append(f"{first.title:<10}{where}")
    return lines


def written(answers: Answers, machine: FoundMachine, able: Sequence[Able]) -> str:
    """The scenario's text, with a comment on each choice."""
    offered = first_scenario(answers.engine)
    cannot = [f"  # {each.name} cannot run here: {each.reason}" for each in able if each.reason]
    lines = [
        *(f"# {line}" for line in ("Written by `kvbench init` for this machine:", *described(machine))),
        "version: 1",
        "",
        *_model_lines(answers),
        "",
        "deployment:",
        *_deployment_lines(answers, machine),
        f"  ready_timeout_s: {offered.ready_s}",
        "  base_port: 21000         # the first of a dozen; 0 takes any free ones",
        "  trace: false             # true: spans of sampled requests for `kvbench timeline`",
        "",
        "connectors:                # each gets a line in the plot; aggregated is the truth for outputs",
        *_connector_lines(answers, machine),
        *(_comment(text) for text in cannot),
        "",
        "workload:",
        f"  input_len: {list(answers.input_len)}",
        f"  output_len: {answers.output_len}",
        "  burstiness: 1.0          # Poisson arrivals",
        "",
        "slo:                       # what each request must meet",
        f"  ttft_ms: {answers.ttft_ms:g}",
        f"  tpot_ms: {answers.tpot_ms:g}",
        "  attainment: 0.95         # of all requests, not of the successful ones",
        "",
        "search:",
        f"  trial_s: {offered.trial_s:g}               # longer gives a result to quote: 60 or more",
        "  min_requests: 60         # 59 without a miss are what shows 95 % at 95 % confidence",
        "  precision: 0.1           # the answer's interval is 10 % wide",
        "  max_trials: 8",
        "",
        "seed: 1                    # the same load for every connector; change it for another run",
    ]
    return "\n".join(lines) + "\n"


def _model_lines(answers: Answers) -> list[str]:
    shape = answers.shape
    per_token = f"# {shape.kv_bytes_per_token() / 1024:g} KiB of KV per token"
    if shape.name in MODELS:
        return [f"model: {shape.name}  {per_token}"]
    fields = {key: value for key, value in asdict(shape).items() if key != "source" and value}
    return [
        f"model:  {per_token}, from its config.json",
        *(f"  {k}: {one_line(v)}" for k, v in fields.items()),
    ]


def _deployment_lines(answers: Answers, machine: FoundMachine) -> list[str]:
    longest = max(answers.input_len) + answers.output_len
    gpus = [str(card.get("index", number)) for number, card in enumerate(machine.gpus)]
    own = first_scenario(answers.engine).option_lines(
        answers.model, longest, machine.installed(answers.engine), gpus
    )
    return [
        f"  engine: {answers.engine}",
        "  prefill: 1               # x and y of xPyD; aggregated has as many engines as both",
        "  decode: 1",
        "  tensor_parallel_size: 1",
        "  engine_options:",
        *(f"    {line}" for line in own),
    ]


def _connector_lines(answers: Answers, machine: FoundMachine) -> list[str]:
    lines: list[str] = []
    for name in answers.connectors:
        options = _options(name, answers, machine)
        lines.append(f"  - name: {name}" if options else f"  - {name}")
        lines += [f"    {key}: {one_line(value)}" for key, value in options.items()]
    return lines


def _options(name: str, answers: Answers, machine: FoundMachine) -> dict[str, str]:
    """Options that follow from the devices; none where the connector's defaults are right."""
    nics = ",".join(machine.nics)
    if name == "mooncake" and nics:
        return {"protocol": "rdma", "device_name": nics}
    if name in ("nixl", "nixl_push"):
        devices = {"ucx_net_devices": ",".join(f"{nic}:1" for nic in machine.nics)} if nics else {}
        # UCX knows best what GPU memory needs; an engine that leaves it no choice would take TCP.
        chooses = engines.options_model(answers.engine).chooses_transport
        return {**({"ucx_tls": "rc,tcp"} if nics and not chooses else {}), **devices}
    return {}


def _comment(text: str) -> str:
    return "  " + " ".join(text.split())
