"""Runs the plans of a SessionState against a server that is a list of answers, without time, threads or sockets."""

from __future__ import annotations

from typing import Any, TypeVar

from slotcar.v1 import adapter_pb2, layout_pb2
from slotcar.v1 import engine_service_pb2 as pb
from slotcar_client import torch_tensors
from slotcar_client.effects import Call, Effect, Forward, Open, Plan, Stale, Wait, run
from slotcar_client.errors import AdapterNotFound, SlotcarError, Unavailable
from slotcar_client.options import SessionOptions
from slotcar_client.session_state import SessionState
from slotcar_client.values import Held

from tests.unit.client.fake_engine import A

T = TypeVar("T")


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Face:
    """A face whose server knows the adapter sql. `fail` has the errors of the next calls by the name of their request.

    `log` has every effect in order: the name of the request, "wait" or "stale".
    """

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.state = SessionState(SessionOptions(**options), self.clock)
        self.fail: dict[str, list[SlotcarError]] = {}
        self.log: list[str] = []
        self.requests: list[Any] = []
        self.sessions = 0
        self.generation = 0
        self.away_until = 0.0
        self.digest = A
        self.version = ""
        self.run(self.state.open())

    def run(self, plan: Plan[T]) -> T:
        return run(plan, self._perform)

    def named(self, name: str) -> list[Any]:
        return [request for request in self.requests if type(request).__name__ == f"{name}Request"]

    def _perform(self, effect: Effect) -> Any:
        match effect:
            case Wait():
                self.log.append("wait")
                self.clock.now += effect.seconds
                return None
            case Stale():
                self.log.append("stale")
                if self.state.options.on_stale is not None:
                    self.state.options.on_stale(effect.mapping, effect.error)
                return None
            case Forward():
                outgoing = torch_tensors.to_request(effect)
                return torch_tensors.to_outputs(effect, outgoing, self._answer(outgoing.request))
            case Call() | Open():
                return self._answer(effect.request)

    def _answer(self, message: Any) -> Any:
        name = type(message).__name__.removesuffix("Request")
        request = type(message)()
        request.CopyFrom(message)
        self.log.append(name)
        self.requests.append(request)
        if self.clock.now < self.away_until:
            raise Unavailable("nobody there")
        if self.fail.get(name):
            raise self.fail[name].pop(0)
        answer: Any = getattr(self, f"_{name}")(request)
        return answer

    @property
    def _layout(self) -> layout_pb2.LayoutVersion:
        return layout_pb2.LayoutVersion(epoch=f"e{self.sessions}", generation=self.generation)

    def _OpenSession(self, request: pb.OpenSessionRequest) -> pb.SessionOpened:
        self.sessions += not request.resume_session
        layout = layout_pb2.Layout(version=self._layout)
        server = pb.ServerInfo(version=self.version)
        return pb.SessionOpened(session=f"s{self.sessions}", layout=layout, server=server)

    def _CloseSession(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        return pb.CloseSessionResponse()

    def _resolve(self, ref: str) -> str:
        if ref.partition("@")[2] not in ("", self.digest):
            raise AdapterNotFound(f"no {ref}", adapters=ref)
        return self.digest

    def _SetMapping(self, request: pb.SetMappingRequest) -> pb.SetMappingResponse:
        entries = [pb.ResolvedEntry(digest="" if e.base else self._resolve(e.ref)) for e in request.targets]
        self.generation += 1
        return pb.SetMappingResponse(generation=self.generation, entries=entries, layout=self._layout)

    def _ReleaseMapping(self, request: pb.ReleaseMappingRequest) -> pb.ReleaseMappingResponse:
        return pb.ReleaseMappingResponse(layout=self._layout)

    def _HoldAdapter(self, request: pb.HoldAdapterRequest) -> pb.HoldAdapterResponse:
        return pb.HoldAdapterResponse(digest=self._resolve(request.ref), tier=adapter_pb2.TIER_HOST)

    def _ReleaseHold(self, request: pb.ReleaseHoldRequest) -> pb.ReleaseHoldResponse:
        return pb.ReleaseHoldResponse()

    def _Fence(self, request: pb.FenceRequest) -> pb.FenceResponse:
        return pb.FenceResponse()

    def _Forward(self, request: pb.ForwardRequest) -> pb.ForwardResponse:
        return pb.ForwardResponse(
            layout=self._layout, digests=[self.digest], outputs=[item.x for item in request.items]
        )


def make_hold(hold_id: int, ref: str, tier: str) -> Held:
    return Held(hold_id, ref, tier)
