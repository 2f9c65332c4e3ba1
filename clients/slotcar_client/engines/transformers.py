"""Adds a session's LoRA to a transformers model, by hooks on its layers; for inference only.

    attachment = attach(model, session)
    with session.rows(["sql", BASE, "support"]):     one entry per sequence of the batch
        model.generate(**batch)

Inside `rows`, output = base output + delta, for the rows whose adapter has weights at the site; the bits of all other
rows are the base model's. Outside, the model is the base model. Dimension 0 of an input [batch, …, features] is the
batch; for inputs of two dimensions the entries need row counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from slotcar.v1 import model_pb2, tensor_pb2
from torch import nn

from slotcar_client.convert import DTYPES
from slotcar_client.engines.experts import experts_output, router_output
from slotcar_client.engines.inputs import SharedInputs
from slotcar_client.engines.layers import EVERYTHING, Layer, Wanted, layers_of
from slotcar_client.errors import MappingNotFound, ModelMismatch, ShapeMismatch
from slotcar_client.session import Session
from slotcar_client.values import Mapping

_MAX_SHOWN = 5


def model_spec(
    model: nn.Module, *, embeddings: bool = False, tied_head: bool = False, experts: bool = False
) -> model_pb2.ModelSpec:
    """The ModelSpec of `model`: a site per linear layer, by its name in `named_modules`; and the model's dtype.

    Slots have room for every site, so what few adapters target has to be asked for: embeddings: the input embedding.
    tied_head: an output embedding that shares its weight with the input embedding; a LoRA on one of them changes that
    side only. experts: the fused experts of Mixtral, Qwen2-MoE, Qwen3-MoE and those alike, also for adapters that were
    trained when each expert was a module, and their routers.
    """
    wanted = Wanted(embeddings, tied_head, experts)
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    return model_pb2.ModelSpec(
        sites=[layer.site for layer in layers_of(model, wanted)],
        dtype=DTYPES.get(dtype, tensor_pb2.DTYPE_UNSPECIFIED),
        tensor_parallel=1,
    )


def attach(model: nn.Module, session: Session, *, require_rows: bool = False) -> Attachment:
    """Hooks every linear layer of `model`, and the other sites of the server's model. One model at a time can be
    attached to a session.

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
        self._layers, self._blocks = _hooked(model, session.model_spec)
        self._inputs = SharedInputs(self._ask)
        self._mapping: Mapping | None = None
        self._spans: dict[str, tuple[slice, ...]] = {}
        self._needing: frozenset[str] = frozenset()
        # Of each block with experts, the shape of its input but for the features: what is inside gets it flattened.
        self._batches: dict[str, list[int]] = {}
        session.follow_rows(self._begin)
        # Code that was compiled before does not look for new hooks.
        torch.compiler.reset()
        self._handles = [
            module.register_forward_hook(_uncompiled(hook), with_kwargs=True) for module, hook in self._hooks()
        ]
        self._handles += [
            model.get_submodule(block).register_forward_pre_hook(
                _uncompiled(partial(self._note_batch, block)), with_kwargs=True
            )
            for block in set(self._blocks.values())
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

    # The hooks

    def _hooks(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """One for each module: fused experts are two sites."""
        done: set[nn.Module] = set()
        hooks = {
            "linear": self._add_delta,
            "embedding": self._add_embedding,
            "router": self._route,
            "experts": self._compute_experts,
        }
        for name, layer in self._layers.items():
            if layer.module not in done:
                done.add(layer.module)
                yield layer.module, partial(hooks[layer.kind], name)

    def _mapping_at(self, *sites: str) -> Mapping | None:
        """The mapping, if one of its adapters has weights at one of the sites. Raises MappingNotFound."""
        mapping = self._mapping
        if mapping is None and self._require_rows:
            raise MappingNotFound(f"{sites[0]} was called outside of session.rows", site=sites[0])
        return mapping if mapping is not None and any(site in self._spans for site in sites) else None

    def _add_delta(
        self, site: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor | None:
        mapping = self._mapping_at(site)
        if mapping is None:
            return None
        x = _first(args, kwargs)
        rows = self._rows(site, list(x.shape[:-1]), mapping)
        if site in self._needing:
            base = _flat(output)
            delta = self._session.forward({site: _flat(x)}, rows, aux={site: base}, mapping=mapping)[site]
        else:
            delta = self._inputs.delta(site, x, mapping, self._is_plain)
        return _add(output, delta, list(_row_slices(self._spans[site], rows)))

    def _is_plain(self, site: str) -> bool:
        return site in self._spans and site not in self._needing

    def _add_embedding(
        self, site: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor | None:
        mapping = self._mapping_at(site)
        if mapping is None:
            return None
        ids = _first(args, kwargs)
        rows, aux = self._rows(site, list(ids.shape), mapping), {site: ids.reshape(-1)}
        spans = list(_row_slices(self._spans[site], rows))
        if site in self._needing:
            adapted = self._session.forward({}, rows, {site: _flat(output)}, aux=aux, mapping=mapping)[site]
            return _put(output, adapted, spans)
        delta = self._session.forward({}, rows, aux=aux, mapping=mapping)[site].to(output.dtype)
        scale = getattr(module, "embed_scale", None)  # what the layer multiplies its rows with, and so PEFT the delta
        return _add(output, delta if scale is None else delta * scale, spans)

    def _note_batch(self, block: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._mapping is not None:
            x = _first(args, kwargs)
            self._batches[block] = list(x.shape[:-1])

    def _route(self, site: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        mapping = self._mapping_at(site)
        if mapping is None:
            return None
        x = _first(args, kwargs)
        rows = self._rows(site, list(x.shape[:-1]), mapping)
        aux = {site: nn.functional.linear(_flat(x), module.weight)} if site in self._needing else None  # type: ignore[arg-type]
        delta = self._session.forward({site: _flat(x)}, rows, aux=aux, mapping=mapping)[site]
        spans = list(_row_slices(self._spans[site], rows))
        adapted = router_output(module, args, kwargs, delta)
        return tuple(_put(mine, theirs, spans) for mine, theirs in zip(output, adapted, strict=True))

    def _compute_experts(
        self, site: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor | None:
        path = site.rpartition(".")[0]
        sites = [f"{path}.gate_up_proj", f"{path}.down_proj"]
        mapping = self._mapping_at(*sites)
        if mapping is None:
            return None
        hidden, chosen, weights = (*args, *kwargs.values())[:3]
        rows = self._rows(site, list(hidden.shape[:-1]), mapping)
        spans = _merged(span for name in sites for span in self._spans.get(name, ()))
        places = torch.cat([torch.arange(part.start, part.stop) for part in _row_slices(spans, rows)]).to(hidden.device)
        adapted = {index for span in spans for index in range(span.start, span.stop)}
        counts = [count * chosen.shape[-1] if index in adapted else 0 for index, count in enumerate(rows)]

        def delta(leaf: str, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor | None:
            name = f"{path}.{leaf}"
            if name not in self._spans:
                return None
            return self._session.forward({name: x}, counts, aux={name: numbers}, mapping=mapping)[name]

        result = output.clone()
        result[places] = experts_output(module, hidden[places], chosen[places], weights[places], delta).to(output.dtype)
        return result

    def _rows(self, site: str, shape: list[int], mapping: Mapping) -> tuple[int, ...]:
        """The row counts of an input of that shape, but for the features. Raises ShapeMismatch."""
        block = self._blocks.get(site)
        if block is None or len(shape) > 1:
            return _row_counts(shape, mapping, site)
        batch = self._batches.get(block, [])
        if math.prod(batch) != math.prod(shape):
            raise _mismatch(f"{site} got {math.prod(shape)} rows", shape, f"those of its block, which got {batch}")
        return _row_counts(batch, mapping, site)

    # The mapping

    def _begin(self, mapping: Mapping | None) -> None:
        """A `rows` block begins, or ends with None: learns for which entries each site has weights.

        Raises ModelMismatch when an adapter has weights for a site that the model does not have.
        """
        self._inputs.forget()
        self._mapping, self._spans, self._needing, self._batches = None, {}, frozenset(), {}
        if mapping is None:
            return
        entries: dict[str, list[int]] = {}
        for index, sites in enumerate(self._session.sites_of(mapping)):
            if missing := sorted(sites - self._layers.keys()):
                raise ModelMismatch(
                    f"{mapping.entries[index]} has weights for sites that the attached model does not have: "
                    f"{', '.join(missing[:_MAX_SHOWN])}",
                    difference=", ".join(missing),
                )
            for site in sites:
                entries.setdefault(site, []).append(index)
        self._needing = frozenset().union(*self._session.sites_needing_base(mapping))
        self._spans = {site: tuple(_runs(indices)) for site, indices in entries.items()}
        self._mapping = mapping

    def _ask(self, mapping: Mapping, sites: Sequence[str], x: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = self._rows(sites[0], list(x.shape[:-1]), mapping)
        return self._session.forward(dict.fromkeys(sites, _flat(x)), row_counts=rows, mapping=mapping)


def _hooked(model: nn.Module, spec: model_pb2.ModelSpec | None) -> tuple[dict[str, Layer], dict[str, str]]:
    """Every linear layer, and what else is a site of the server's model, by site; and which block of experts it is in.

    Raises ModelMismatch.
    """
    known = {site.name: (site.in_features, site.out_features) for site in (spec.sites if spec is not None else ())}
    always = {layer.name for layer in layers_of(model, Wanted())}
    all_layers = list(layers_of(model, EVERYTHING))
    experts = {layer.name.rpartition(".")[0] for layer in all_layers if layer.kind == "experts"}
    blocks = sorted(name.rpartition(".")[0] for name in experts)
    layers = {layer.name: layer for layer in all_layers if layer.name in always or layer.name in known}
    differences = [
        f"{name}: server {features}, model {layers[name].features}"
        for name, features in known.items()
        if name in layers and layers[name].features != features
    ]
    if differences:
        raise ModelMismatch(
            f"the model is not the server's: {'; '.join(differences[:_MAX_SHOWN])}", difference="; ".join(differences)
        )
    return layers, {name: block for name in layers for block in blocks if name.startswith(f"{block}.")}


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A module's input, by place or by any name."""
    x: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
    return x


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1])


def _row_counts(shape: list[int], mapping: Mapping, site: str) -> tuple[int, ...]:
    """How many rows of an input of that shape, but for the features, each entry has.

    Raises ShapeMismatch: the counts come from the batch or from the caller.
    """
    entries, rows = len(mapping.entries), math.prod(shape)
    if mapping.row_counts is not None:
        if sum(mapping.row_counts) != rows:
            raise _mismatch(f"{site} got {rows} rows", shape, f"{sum(mapping.row_counts)} rows, as `rows` says")
        return mapping.row_counts
    if len(shape) < 2:
        raise _mismatch(f"{site} got an input of {len(shape) + 1} dimensions", shape, "row counts, as ('name', 3)")
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


def _merged(spans: Iterable[slice]) -> list[slice]:
    """The entries that are in one of the slices, in order."""
    return list(_runs(sorted({index for span in spans for index in range(span.start, span.stop)})))


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


def _put(output: torch.Tensor, adapted: torch.Tensor, rows: Sequence[slice]) -> torch.Tensor:
    """`adapted` in `rows`, and the bits of output elsewhere."""
    result = output.clone(memory_format=torch.contiguous_format)
    flat, theirs = result.view(-1, result.shape[-1]), adapted.reshape(-1, adapted.shape[-1])
    for part in rows:
        flat[part] = theirs[part].to(flat.dtype)
    return result
