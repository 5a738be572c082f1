"""``kvbench init``: write a commented scenario for this machine."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console

from kvbench import engines
from kvbench.core.physics import MODELS, ModelShape
from kvbench.core.scenario.scenario import parse_scenario
from kvbench.core.scenario.yaml_lines import one_line
from kvbench.errors import EXIT_OK, InputError
from kvbench.files import store_errors, write_bytes
from kvbench.hosts.version_rules import Check
from kvbench.planning.init_elsewhere import (
    READY_S,
    Elsewhere,
    FoundMachine,
    able_connectors,
    first_scenario,
    look_around,
    machine_elsewhere,
    preferred,
)
from kvbench.planning.scenario_files import plain_name, registry

SERVER_TRIAL_S = 20.0


@dataclass(frozen=True)
class Answers:
    engine: str
    model: str
    shape: ModelShape
    connectors: tuple[str, ...]
    input_len: tuple[int, ...]
    output_len: int
    ttft_ms: float
    tpot_ms: float
    decode: int = 1
    """Decode instances: one per host except the first."""
    ranks: int = 1
    partition: str = ""


def machine_lines(machine: FoundMachine) -> list[str]:
    cards = [str(card.get("name")) for card in machine.gpus]
    lines = [f"GPUs      {', '.join(cards) or 'none'}", f"RDMA      {', '.join(machine.nics) or 'none'}"]
    for name in engines.names():
        offer, found = engines.get(name).first_scenario, machine.installed(name)
        if offer and offer.title:
            where = f"{found.version} at {found.command}" if found.command else "none on the PATH"
            lines.append(f"{offer.title:<10}{where}")
    return lines


def scenario_text(
    answers: Answers, machine: FoundMachine, checks: Sequence[Check], elsewhere: Elsewhere | None = None
) -> str:
    """Scenario text with a comment on each choice."""
    offered = first_scenario(answers.engine)
    ready_s = offered.ready_s
    if elsewhere:
        ready_s = max(ready_s, READY_S) if offered.loads_model else ready_s
    unusable = [f"  # {check.name} cannot run here: {check.detail}" for check in checks if check.detail]
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
        "  base_port: 21000         # the first of a dozen; 0 uses free ports",
        "  trace: false             # true: spans of sampled requests for `kvbench export timeline`",
        "",
        "connectors:                # each gets a line in the plot; aggregated gives the reference outputs",
        *_connector_lines(answers, machine),
        *(("  " + " ".join(text.split())) for text in unusable),
        *_load_lines(answers, offered.trial_s),
    ]
    return "\n".join(lines) + "\n"


def server_scenario_text(answers: Answers, elsewhere: Elsewhere) -> str:
    """Scenario text for a running server. Raises InputError or ServerError without one."""
    server, longest = elsewhere.server_lines()
    room = math.inf if longest is None else longest - answers.output_len
    fitting = tuple(length for length in answers.input_len if length <= room) or (max(1, int(room)),)
    answers = replace(answers, input_len=fitting)
    lines = [
        *(f"# {line}" for line in _header(None, elsewhere)),
        "version: 1",
        "",
        *server,
        "",
        "connectors: [aggregated]   # one URL counts as one server",
        *_load_lines(answers, SERVER_TRIAL_S),
    ]
    return "\n".join(lines) + "\n"


def _header(machine: FoundMachine | None, elsewhere: Elsewhere | None) -> Sequence[str]:
    if elsewhere:
        return [f"Written by `kvbench init` for {elsewhere.words()}."]
    return ["Written by `kvbench init` for this machine:", *(machine_lines(machine) if machine else ())]


def _load_lines(answers: Answers, trial_s: float) -> Sequence[str]:
    return [
        "",
        "workload:",
        f"  input_len: {list(answers.input_len)}",
        f"  output_len: {answers.output_len}",
        "  burstiness: 1.0          # Poisson arrivals",
        "",
        "slo:                       # limits for each request",
        f"  ttft_ms: {answers.ttft_ms:g}",
        f"  tpot_ms: {answers.tpot_ms:g}",
        "  attainment: 0.95         # of all requests, including failed ones",
        "",
        "search:",
        f"  trial_s: {trial_s:g}               # for results to publish: 60 or more",
        "  min_requests: 60         # 59 without a miss prove 95 % at 95 % confidence",
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
    option_lines = first_scenario(answers.engine).option_lines(
        answers.model, longest, machine.installed(answers.engine), gpus
    )
    return [
        f"  engine: {answers.engine}",
        "  prefill: 1               # x and y of xPyD; aggregated has as many engines as both",
        f"  decode: {answers.decode}",
        f"  tensor_parallel_size: {answers.ranks}",
        "  engine_options:",
        *(f"    {line}" for line in option_lines),
    ]


def _connector_lines(answers: Answers, machine: FoundMachine) -> list[str]:
    lines: list[str] = []
    for name in answers.connectors:
        options = _options(name, answers, machine)
        lines.append(f"  - name: {name}" if options else f"  - {name}")
        lines += [f"    {key}: {one_line(value)}" for key, value in options.items()]
    return lines


def _options(name: str, answers: Answers, machine: FoundMachine) -> dict[str, object]:
    """Options that follow from devices, beyond the connector's defaults."""
    nics = ",".join(machine.nics)
    if machine.efa:  # no verbs for Mooncake's usual build, and UCX would emulate
        return {"backends": ["LIBFABRIC"]} if name in ("nixl", "nixl_push") else {}
    if name == "mooncake" and nics:
        return {"protocol": "rdma", "device_name": nics}
    if name in ("nixl", "nixl_push"):
        devices = {"ucx_net_devices": ",".join(f"{nic}:1" for nic in machine.nics)} if nics else {}
        # UCX chooses well for GPU memory; a fixed choice would use TCP.
        chooses = engines.options_model(answers.engine).chooses_transport
        return {**({"ucx_tls": "rc,tcp"} if nics and not chooses else {}), **devices}
    return {}


DTYPES: Final = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def command(
    file: Path, console: Console, *, yes: bool, force: bool, elsewhere: Elsewhere | None = None
) -> int:
    """Query the user (or use defaults), write the file, print the next step. Raises InputError."""
    if file.exists() and not force:
        raise InputError(f"{file} already exists", hint="give another name, or --force to replace it")
    if not yes and not sys.stdin.isatty():
        raise InputError("there is no terminal for questions", hint="--yes uses all defaults")
    text = _text_of(elsewhere or Elsewhere(), _default if yes else _prompt, console)
    parse_scenario(text, str(file), registry())
    with store_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, text.encode())
    name = str(file) if "/" in str(file) or file.suffix in (".yaml", ".yml") else f"./{file}"
    console.print(f"\nwritten: {file}\nnext:", markup=False)
    install = ("hosts install",) if elsewhere and elsewhere.hosts else ()
    for step in (*install, "doctor", "plan", "sweep"):
        console.print(f"  kvbench {step} {name}", markup=False)
    return EXIT_OK


def _text_of(elsewhere: Elsewhere, ask: Ask, console: Console) -> str:
    if elsewhere.base_url:
        return server_scenario_text(_load_answers(ask), elsewhere)
    if elsewhere:
        machine = machine_elsewhere()
        answers, checks = gather(machine, ask, console, elsewhere)
        return scenario_text(answers, machine, checks, elsewhere)
    machine = look_around()
    for line in machine_lines(machine):
        console.print(line, markup=False)
    answers, checks = gather(machine, ask, console)
    return scenario_text(answers, machine, checks)


# Questions

Ask = Callable[[str, Any, Callable[[str], Any]], Any]


def _default(question: str, default: Any, parse: Callable[[str], Any]) -> Any:
    return parse(str(default))


def _prompt(question: str, default: Any, parse: Callable[[str], Any]) -> Any:
    try:
        return typer.prompt(question, default=str(default), value_proc=parse)
    except typer.Abort:  # from Ctrl-C or Ctrl-D
        raise KeyboardInterrupt from None


def _load_answers(ask: Ask) -> Answers:
    """Answers on the load of a server with an unknown engine."""
    offered = first_scenario("vllm")
    return Answers(
        engine="external",
        model="",
        shape=next(iter(MODELS.values())),
        connectors=("aggregated",),
        input_len=ask("input lengths in tokens", offered.input_len, _lengths),
        output_len=ask("output tokens", offered.output_len, _whole),
        ttft_ms=ask("limit of the time to the first token, ms", offered.ttft_ms, _limit),
        tpot_ms=ask("limit of the time per further token, ms", offered.tpot_ms, _limit),
    )


def gather(
    machine: FoundMachine, ask: Ask, console: Console, elsewhere: Elsewhere | None = None
) -> tuple[Answers, list[Check]]:
    """Collect answers and usable connectors. ``elsewhere``: unknown machine, so all connectors stay. Raises
    InputError without a connector."""
    engine, *others = found = tuple(machine.engines)
    if others:
        engine = ask(f"engine ({', '.join(found)})", engine, _one_of(found))
    offered = first_scenario(engine)
    if offered.loads_model:
        model = ask("model, a folder or an id", offered.model, _text)
        shape = shape_of(model) or MODELS[ask("its shape as a preset", _nearest(model), _one_of(MODELS))]
    else:
        model = ask(f"model ({', '.join(MODELS)}; or a folder)", offered.model, _known_model)
        shape = MODELS.get(model) or _known_shape(model)
    checks = preferred(engine) if elsewhere else able_connectors(engine, machine)
    for check in checks:
        if check.detail:
            console.print(f"  {check.name} cannot run here: {check.detail}. Fix: {check.fix}", markup=False)
    usable = tuple(check.name for check in checks if not check.detail)
    if not usable:
        raise InputError("no connector can run here", hint="`kvbench doctor` shows what is missing")
    chosen = ask("connectors", ",".join(usable), _some_of(usable))
    ranks = ask("tensor parallel size, GPUs of an instance", 1, _ranks) if elsewhere else 1
    on_slurm = elsewhere is not None and elsewhere.scheduler == "slurm"
    partition = ask("Slurm partition (- for the default)", "-", _text) if on_slurm else ""
    return (
        Answers(
            engine=engine,
            model=model,
            shape=shape,
            connectors=chosen,
            input_len=ask("input lengths in tokens", offered.input_len, _lengths),
            output_len=ask("output tokens", offered.output_len, _whole),
            ttft_ms=ask("limit of the time to the first token, ms", offered.ttft_ms, _limit),
            tpot_ms=ask("limit of the time per further token, ms", offered.tpot_ms, _limit),
            decode=max(1, len(elsewhere.hosts) - 1) if elsewhere else 1,
            ranks=ranks,
            partition=partition.strip("-"),
        ),
        checks,
    )


def _one_of(words: Sequence[str] | Mapping[str, Any]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip() not in words:
            raise typer.BadParameter(f"one of: {', '.join(words)}")
        return text.strip()

    return parse


def _some_of(words: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        if not chosen or set(chosen) - set(words):
            raise typer.BadParameter(f"comma-separated, some of: {', '.join(words)}")
        return chosen

    return parse


def _text(text: str) -> str:
    if not text.strip():
        raise typer.BadParameter("must not be empty")
    return text.strip()


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1 or max(lengths) > 10_000_000:
        raise typer.BadParameter("comma-separated whole numbers from 1")
    return lengths


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text.strip()) or int(text) < 2:
        raise typer.BadParameter("a whole number from 2: one token has no time per further token")
    return int(text)


def _ranks(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,2}", text.strip()):
        raise typer.BadParameter("a whole number from 1")
    return int(text)


def _limit(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e7:
        raise typer.BadParameter("a number of milliseconds above 0")
    return value


def _known_model(text: str) -> str:
    if text.strip() not in MODELS and shape_of(text.strip()) is None:
        raise typer.BadParameter(f"a preset ({', '.join(MODELS)}) or a folder with a config.json")
    return text.strip()


# Models


def _known_shape(model: str) -> ModelShape:
    shape = shape_of(model)
    assert shape is not None
    return shape


def shape_of(model: str) -> ModelShape | None:
    """KV shape by a model folder's config.json, or None."""
    path = Path(model).expanduser() / "config.json"
    try:
        config = json.loads(path.read_bytes())
        config = config.get("text_config") or config
        heads = int(config["num_attention_heads"])
        latent = int(config.get("kv_lora_rank") or 0)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return ModelShape(
            name=plain_name(path.parent.resolve().name),
            layers=int(config["num_hidden_layers"]),
            kv_heads=0 if latent else int(config.get("num_key_value_heads") or heads),
            head_dim=0 if latent else int(config.get("head_dim") or config["hidden_size"] // heads),
            kv_dtype=DTYPES.get(dtype, "bf16"),  # type: ignore[arg-type]
            mla_dim=latent + int(config.get("qk_rope_head_dim") or 0) if latent else 0,
            vocab_size=int(config["vocab_size"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _nearest(model: str) -> str:
    """Preset that a model id starts with, such as qwen3-8b for Qwen/Qwen3-8B-FP8."""
    name = model.rstrip("/").split("/")[-1].lower()
    fitting = [preset for preset in MODELS if name.startswith(preset)]
    return max(fitting, key=len, default="qwen3-8b")
