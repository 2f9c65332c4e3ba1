"""OperatorService: asks the process to end, to log more or less, and what it is; what that takes is given to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from google.protobuf import timestamp_pb2
from grpc import aio
from slotcar.v1 import operator_service_pb2 as pb
from slotcar.v1 import operator_service_pb2_grpc

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.rpc import convert
from slotcar_sidecar.rpc.health import Health, Phase

Context = aio.ServicerContext[Any, Any]

_MOST_DEADLINE_SECONDS = 24 * 3600.0
_LEVELS: dict[int, str] = {
    pb.LOG_LEVEL_DEBUG: "debug",
    pb.LOG_LEVEL_INFO: "info",
    pb.LOG_LEVEL_WARNING: "warning",
    pb.LOG_LEVEL_ERROR: "error",
}
_NUMBERS: dict[str, pb.LogLevel.ValueType] = {
    name: pb.LogLevel.Value(f"LOG_LEVEL_{name.upper()}") for name in _LEVELS.values()
}
_STATES: dict[Phase, pb.ServerState.ValueType] = {
    Phase.SERVING: pb.SERVER_STATE_SERVING,
    Phase.SHUTTING_DOWN: pb.SERVER_STATE_SHUTTING_DOWN,
    Phase.DEVICE_LOST: pb.SERVER_STATE_DEVICE_LOST,
}


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """The process: `settings` by flag, without secrets; `started` in Unix seconds; where it serves."""

    settings: Mapping[str, str]
    pid: int
    started: float
    working_directory: str
    addresses: Sequence[str]
    metrics_url: str


@dataclass(frozen=True, slots=True)
class Operations:
    """What operators may do to the process.

    `shut_down` takes a deadline in seconds or None for the setting's, and returns the seconds that are left;
    `set_level` returns the level before.
    """

    shut_down: Callable[[float | None], float]
    set_level: Callable[[str], str]
    level: Callable[[], str]
    facts: Callable[[], ProcessFacts]


class OperatorService(operator_service_pb2_grpc.OperatorServiceServicer):
    """For operators."""

    def __init__(self, cache: AdapterCache, operations: Operations, health: Health) -> None:
        self._cache = cache
        self._operations = operations
        self._health = health

    async def Shutdown(self, request: pb.ShutdownRequest, context: Context) -> pb.ShutdownResponse:
        seconds = convert.to_seconds("deadline", request, request.deadline)
        if seconds is not None and not 0 <= seconds <= _MOST_DEADLINE_SECONDS:
            wanted = f"from 0 to {_MOST_DEADLINE_SECONDS:g} s"
            raise RequestInvalid("deadline", found=f"{seconds:g} s", wanted=wanted)
        left = self._operations.shut_down(seconds)
        return pb.ShutdownResponse(
            time_left=convert.from_seconds(left), layout=convert.from_version(self._cache.layout)
        )

    async def SetLogLevel(self, request: pb.SetLogLevelRequest, context: Context) -> pb.SetLogLevelResponse:
        previous = self._operations.set_level(convert.known("level", request.level, _LEVELS))
        return pb.SetLogLevelResponse(previous=_NUMBERS[previous], layout=convert.from_version(self._cache.layout))

    async def GetSettings(self, request: pb.GetSettingsRequest, context: Context) -> pb.GetSettingsResponse:
        facts = self._operations.facts()
        started = timestamp_pb2.Timestamp()
        started.FromNanoseconds(int(facts.started * 1e9))
        return pb.GetSettingsResponse(
            settings=facts.settings,
            log_level=_NUMBERS[self._operations.level()],
            state=self._state(),
            version=version("slotcar"),
            pid=facts.pid,
            started=started,
            working_directory=facts.working_directory,
            addresses=facts.addresses,
            metrics_url=facts.metrics_url,
            layout=convert.from_version(self._cache.layout),
        )

    def _state(self) -> pb.ServerState.ValueType:
        """No call is answered before the start-up has ended."""
        phase = self._health.phase
        if phase is Phase.SERVING and self._cache.model is None:
            return pb.SERVER_STATE_WAITING_FOR_MODEL
        return _STATES.get(phase, pb.SERVER_STATE_SERVING)
