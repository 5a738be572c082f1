"""An external simulator: a command that replaces servers on virtual time."""

from __future__ import annotations

import shlex

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from kvbench.connectors.base import Connector, ConnectorOptions
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.scenario.options import Simulator
from kvbench.engines.base import Engine, EngineOptions, Instance
from kvbench.errors import InputError, Problem

_NO_SERVER = Problem(
    "the system engine is a simulator's command, which answers on virtual time only",
    "simulate it: kvbench simulate --system COMMAND",
)


class SystemOptions(EngineOptions):
    starts_processes = False
    uses_gpus = False

    command: str = Field(
        ..., min_length=1, description="the simulator's command line: a program and its arguments; no shell"
    )
    gpus: int | None = Field(
        None, ge=1, le=65536, description="GPUs that it simulates, in total; enables rates per GPU"
    )
    answer_timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="seconds of real time in which it must answer a trial"
    )

    @field_validator("command")
    @classmethod
    def _usable(cls, command: str) -> str:
        problem = ""
        try:
            if not shlex.split(command):
                problem = "must name a program"
        except ValueError as error:
            problem = f"is not a command line: {str(error).lower()}"
        if "\0" in command:
            problem = "must not contain a null byte"
        if problem:
            raise PydanticCustomError("kvbench", "{text}", {"text": problem})
        return command

    @property
    def simulator(self) -> Simulator:
        return Simulator(self.command, self.answer_timeout_s)


class SystemEngine(Engine):
    """Serves nothing; only ``kvbench simulate`` uses it."""

    name = "system"
    options_model = SystemOptions

    def check(self, connector: Connector, options: EngineOptions | None = None) -> Problem | None:
        return _NO_SERVER

    def process(
        self,
        instance: Instance,
        connector: Connector,
        connector_options: ConnectorOptions,
        options: EngineOptions,
    ) -> ProcessSpec:
        raise InputError(_NO_SERVER.reason, hint=_NO_SERVER.fix)


ENGINE = SystemEngine()
