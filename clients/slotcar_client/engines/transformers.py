"""Adds a session's LoRA to a transformers model, by hooks on its linear layers; for inference only.

    attachment = attach(model, session)
    with session.rows(["sql", BASE, "support"]):     one entry per sequence of the batch
        model.generate(**batch)

Inside `rows`, output = base output + delta, for the rows whose adapter has weights at the site; the bits of all other
rows are the base model's. Outside, the model is the base model. Dimension 0 of an input [batch, …, features] is the
batch; for inputs of two dimensions the entries need row counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from slotcar.v1 import model_pb2, tensor_pb2
from torch import nn

from slotcar_client.convert import DTYPES
from slotcar_client.engines.inputs import SharedInputs
from slotcar_client.errors import MappingNotFound, ModelMismatch, ShapeMismatch
from slotcar_client.session import Session
from slotcar_client.values import Mapping

_MAX_SHOWN = 5
# Attention reads the weight of these and does not call them, so a hook would add nothing.
_NEVER_CALLED = nn.modules.linear.NonDynamicallyQuantizableLinear


def model_spec(model: nn.Module) -> model_pb2.ModelSpec:
    """The ModelSpec of `model`: a site per linear layer, by its name in `named_modules`; and the model's dtype."""
    sites = []
    for name, module in _linear_modules(model):
        in_features, out_features = _features(module)
        sites.append(
            model_pb2.Site(
                name=name, in_features=in_features, out_features=out_features, kind=model_pb2.SITE_KIND_LINEAR
            )
        )
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    return model_pb2.ModelSpec(sites=sites, dtype=DTYPES.get(dtype, tensor_pb2.DTYPE_UNSPECIFIED), tensor_parallel=1)


def attach(model: nn.Module, session: Session, *, require_rows: bool = False) -> Attachment:
    """Hooks every linear layer of `model`. One model at a time can be attached to a session.

    Outside of `session.rows` the model goes on as the plain base model, also for a caller that forgot the block; with
    `require_rows` its layers raise MappingNotFound there instead.

    Raises ModelMismatch when a site has another shape in the server's model, RequestInvalid when the session has an
    attached model already.
    """
    return Attachment(model, session, require_rows)


class Attachment:
    """The hooks of one model; as a context, it detaches at the end. For one thread at a time."""

    def __init__(self, model: nn.Module, session: Session, require_rows: bool = False) -> None:
        self._session = session
        self._require_rows = require_rows
        self._modules = dict(_linear_modules(model))
        _check_shapes(self._modules, session.model_spec)
        self._inputs = SharedInputs(self._ask)
        self._mapping: Mapping | None = None
        self._spans: dict[str, tuple[slice, ...]] = {}
        session.follow_rows(self._begin)
        # Code that was compiled before does not look for new hooks.
        torch.compiler.reset()
        self._handles = [
            module.register_forward_hook(self._hook(name), with_kwargs=True) for name, module in self._modules.items()
        ]

    def detach(self) -> None:
        """Takes the hooks away: the model is as it was. Idempotent."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._session.unfollow_rows()
        self._begin(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _hook(self, site: str) -> Callable[..., torch.Tensor | None]:
        def add_delta(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
        ) -> torch.Tensor | None:
            mapping = self._mapping
            if mapping is None and self._require_rows:
                raise MappingNotFound(f"{site} was called outside of session.rows", site=site)
            if mapping is None or site not in self._spans:
                return None
            x: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
            rows = _row_counts(x, mapping, site)
            delta = self._inputs.delta(site, x, mapping, self._spans.__contains__)
            return _add(output, delta, list(_row_slices(self._spans[site], rows)))

        hook: Callable[..., torch.Tensor | None] = torch.compiler.disable(add_delta)  # type: ignore[no-untyped-call]
        return hook

    def _begin(self, mapping: Mapping | None) -> None:
        """A `rows` block begins, or ends with None: learns for which entries each site has weights.

        Raises ModelMismatch when an adapter has weights for a site that the model does not have.
        """
        self._inputs.forget()
        self._mapping, self._spans = None, {}
        if mapping is None:
            return
        entries: dict[str, list[int]] = {}
        for index, sites in enumerate(self._session.sites_of(mapping)):
            if missing := sorted(sites - self._modules.keys()):
                raise ModelMismatch(
                    f"{mapping.entries[index]} has weights for sites that the attached model does not have: "
                    f"{', '.join(missing[:_MAX_SHOWN])}",
                    difference=", ".join(missing),
                )
            for site in sites:
                entries.setdefault(site, []).append(index)
        self._spans = {site: tuple(_runs(indices)) for site, indices in entries.items()}
        self._mapping = mapping

    def _ask(self, mapping: Mapping, sites: Sequence[str], x: torch.Tensor) -> dict[str, torch.Tensor]:
        flat = x.detach().reshape(-1, x.shape[-1])
        return self._session.forward(
            dict.fromkeys(sites, flat), row_counts=_row_counts(x, mapping, sites[0]), mapping=mapping
        )


def _linear_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that a LoRA can be added to, each once; not an output embedding that is the input embedding."""
    from transformers.pytorch_utils import Conv1D

    tied = _tied_output(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and not isinstance(module, _NEVER_CALLED) and module is not tied:
            yield name, module


def _tied_output(model: nn.Module) -> nn.Module | None:
    embeddings = [
        getattr(model, getter)() if hasattr(model, getter) else None
        for getter in ("get_output_embeddings", "get_input_embeddings")
    ]
    weights = [getattr(module, "weight", None) for module in embeddings]
    return embeddings[0] if weights[0] is not None and weights[0] is weights[1] else None


def _features(module: nn.Module) -> tuple[int, int]:
    """in_features and out_features; Conv1D keeps its weight as [in, out]."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0], weight.shape[1]


def _check_shapes(modules: dict[str, nn.Module], spec: model_pb2.ModelSpec | None) -> None:
    differences = [
        f"{site.name}: server {(site.in_features, site.out_features)}, model {_features(modules[site.name])}"
        for site in (spec.sites if spec is not None else ())
        if site.name in modules and _features(modules[site.name]) != (site.in_features, site.out_features)
    ]
    if differences:
        raise ModelMismatch(
            f"the model is not the server's: {'; '.join(differences[:_MAX_SHOWN])}", difference="; ".join(differences)
        )


def _row_counts(x: torch.Tensor, mapping: Mapping, site: str) -> tuple[int, ...]:
    """How many rows of x each entry has. Raises ShapeMismatch: the counts come from the batch or from the caller."""
    shape, entries = list(x.shape), len(mapping.entries)
    rows = math.prod(shape[:-1])
    if mapping.row_counts is not None:
        if sum(mapping.row_counts) != rows:
            raise _mismatch(f"{site} got {rows} rows", shape, f"{sum(mapping.row_counts)} rows, as `rows` says")
        return mapping.row_counts
    if len(shape) < 3:
        raise _mismatch(f"{site} got an input of {len(shape)} dimensions", shape, "row counts, as ('name', 3)")
    if shape[0] != entries:
        raise _mismatch(f"{site} got a batch of {shape[0]}", shape, f"{entries} sequences, as `rows` says")
    return (rows // entries,) * entries if entries else ()


def _mismatch(message: str, found: object, wanted: str) -> ShapeMismatch:
    return ShapeMismatch(f"{message}, wanted {wanted}", field="rows", found=found, wanted=wanted)


def _runs(indices: Sequence[int]) -> Iterator[slice]:
    """Ascending indices as slices without gaps."""
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            yield slice(indices[start], indices[end - 1] + 1)
            start = end


def _row_slices(entries: Sequence[slice], row_counts: Sequence[int]) -> Iterator[slice]:
    """Slices of entries as slices of rows."""
    for part in entries:
        first = sum(row_counts[: part.start])
        yield slice(first, first + sum(row_counts[part]))


def _add(output: torch.Tensor, delta: torch.Tensor, rows: Sequence[slice]) -> torch.Tensor:
    """output + delta in `rows`, and the bits of output elsewhere: even + 0 would turn −0 into +0."""
    result = output.clone(memory_format=torch.contiguous_format)
    flat = result.view(-1, result.shape[-1])
    for part in rows:
        flat[part] += delta[part]
    return result
