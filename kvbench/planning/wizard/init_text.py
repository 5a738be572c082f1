"""The text of a new scenario: each choice with a comment on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvbench import engines
from kvbench.core.physics import MODELS, ModelShape
from kvbench.core.scenario.yaml_lines import one_line
from kvbench.planning.wizard.init_elsewhere import READY_S, Elsewhere
from kvbench.planning.wizard.init_machine import Able, FoundMachine, first_scenario

SERVER_TRIAL_S = 20.0


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
    decode: int = 1
    """Decode instances; of hosts all but the first have one."""
    ranks: int = 1
    """Tensor parallel ranks of an instance."""
    partition: str = ""
    """Slurm's."""


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


def written(
    answers: Answers, machine: FoundMachine, able: Sequence[Able], elsewhere: Elsewhere | None = None
) -> str:
    """The scenario's text, with a comment on each choice."""
    offered = first_scenario(answers.engine)
    ready_s = offered.ready_s
    if elsewhere:
        ready_s = max(ready_s, READY_S) if offered.loads_model else ready_s
    cannot = [f"  # {each.name} cannot run here: {each.reason}" for each in able if each.reason]
    lines = [
        *(f"# {line}" for line in _header(machine, elsewhere)),
        "version: 1",
        "",
        *_model_lines(answers),
        "",
        "deployment:",
        *(elsewhere.lines(answers.ranks, answers.partition) if elsewhere else ()),
        *_deployment_lines(answers, machine),
        f"  ready_timeout_s: {ready_s}",
        "  base_port: 21000         # the first of a dozen; 0 takes any free ones",
        "  trace: false             # true: spans of sampled requests for `kvbench timeline`",
        "",
        "connectors:                # each gets a line in the plot; aggregated is the truth for outputs",
        *_connector_lines(answers, machine),
        *(_comment(text) for text in cannot),
        *_load_lines(answers, offered.trial_s),
    ]
    return "\n".join(lines) + "\n"


def written_for_server(answers: Answers, elsewhere: Elsewhere) -> str:
    """The same for a server that is up. Raises InputError or ServerError if it is not."""
    lines = [
        *(f"# {line}" for line in _header(None, elsewhere)),
        "version: 1",
        "",
        *elsewhere.server_lines(),
        "",
        "connectors: [aggregated]   # one URL is one server, whatever is behind it",
        *_load_lines(answers, SERVER_TRIAL_S),
    ]
    return "\n".join(lines) + "\n"


def _header(machine: FoundMachine | None, elsewhere: Elsewhere | None) -> Sequence[str]:
    if elsewhere:
        return [f"Written by `kvbench init` for {elsewhere.words()}."]
    return ["Written by `kvbench init` for this machine:", *(described(machine) if machine else ())]


def _load_lines(answers: Answers, trial_s: float) -> Sequence[str]:
    """What is sent, what it must meet, and how the rate is looked for."""
    return [
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
        f"  trial_s: {trial_s:g}               # longer gives a result to quote: 60 or more",
        "  min_requests: 60         # 59 without a miss are what shows 95 % at 95 % confidence",
        "  precision: 0.1           # the answer's interval is 10 % wide",
        "  max_trials: 12",
        "",
        "seed: 1                    # the same load for every connector; change it for another run",
    ]


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
        f"  decode: {answers.decode}",
        f"  tensor_parallel_size: {answers.ranks}",
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
