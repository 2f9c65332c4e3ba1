"""Between torch tensors and the TensorRefs of a Forward; the only module of the protocol that needs torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slotcar.v1 import engine_service_pb2, tensor_pb2
from slotcar_kernels.buffers import buffer_from_tensor, tensor_from_buffer

from slotcar_client.call_tensors import check_sites, dtype_of, first_tensor, sites_of
from slotcar_client.convert import DTYPE_NAMES, DTYPES
from slotcar_client.effects import Forward, ForwardCall
from slotcar_client.errors import ShapeMismatch
from slotcar_client.protocol import check_forward, check_size, shared_inputs


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A Forward as a message; `sites` are in the order of its items."""

    request: engine_service_pb2.ForwardRequest
    sites: tuple[str, ...]
    device: torch.device


def to_request(forward: Forward) -> Outgoing:
    """The message that asks for a Forward; sites whose x is the very same tensor object share its bytes.

    Raises RequestInvalid, ShapeMismatch, or CapacityExceeded when it is larger than the server takes.
    """
    call, mapping = forward.call, forward.mapping
    check_sites(call)
    request = engine_service_pb2.ForwardRequest(
        session=forward.opened.session,
        mapping_id=mapping.mapping_id,
        generation=mapping.generation,
        row_counts=call.row_counts,
        rank=forward.rank,
    )
    tensor_bytes = 0
    order = shared_inputs(call.inputs.items())
    for site, travels in order:
        item = request.items.add(site=site, mode=engine_service_pb2.FORWARD_MODE_DELTA)
        if travels:
            tensor_bytes += _fill(item.x, f"x of {site}", call.inputs[site])
        tensor_bytes += _fill_rest(item, call)
    alone = sites_of(call)[len(order) :]
    for site in alone:
        item = request.items.add(site=site, mode=engine_service_pb2.FORWARD_MODE_DELTA)
        item.out_dtype = DTYPES[str(dtype_of(call, site)).removeprefix("torch.")]
        tensor_bytes += _fill_rest(item, call)
    check_size(request, tensor_bytes, forward.opened.server.max_message_bytes)
    sites = *(site for site, _ in order), *alone
    return Outgoing(request, sites, first_tensor(call, sites[0]).device)


def to_outputs(
    forward: Forward, outgoing: Outgoing, response: engine_service_pb2.ForwardResponse
) -> dict[str, torch.Tensor]:
    """{site: output [rows, out_features]} on the device of the inputs. Raises AuditFailed."""
    check_forward(forward.mapping, outgoing.request, response)
    return {site: _tensor(ref).to(outgoing.device) for site, ref in zip(outgoing.sites, response.outputs, strict=True)}


def _fill_rest(item: engine_service_pb2.ForwardItem, call: ForwardCall) -> int:
    """Writes what the item has beside its x, and returns how many bytes that is."""
    site, written = item.site, 0
    if call.base is not None:
        item.mode = engine_service_pb2.FORWARD_MODE_ADD
        written += _fill(item.base, f"base of {site}", call.base[site])
    if call.aux is not None and site in call.aux:
        aux = call.aux[site]
        if aux.dtype is torch.int32:
            written += _fill_indices(item.aux, aux)
        else:
            written += _fill(item.aux, f"aux of {site}", aux)
    return written


def _fill_indices(ref: tensor_pb2.TensorRef, indices: torch.Tensor) -> int:
    """The same of what `with_aux` made of indices."""
    ref.dtype, ref.rows, ref.columns = tensor_pb2.DTYPE_INT32, len(indices), 1
    ref.inline = indices.numpy().astype("<i4").tobytes()
    return 4 * len(indices)


def _fill(ref: tensor_pb2.TensorRef, field: str, tensor: torch.Tensor) -> int:
    """Writes the tensor into `ref` and returns how many bytes it has."""
    if tensor.dim() != 2:
        raise ShapeMismatch(
            f"{field} has {tensor.dim()} dimensions, wanted [rows, features]",
            field=field,
            found=list(tensor.shape),
            wanted="[rows, features]",
        )
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        wanted = " or ".join(DTYPES)
        raise ShapeMismatch(f"{field} is {name}, wanted {wanted}", field=field, found=name, wanted=wanted)
    dtype, ref.rows, ref.columns, data = buffer_from_tensor(tensor.detach().cpu())
    ref.dtype = DTYPES[dtype]
    ref.inline = data
    return len(data)


def _tensor(ref: tensor_pb2.TensorRef) -> torch.Tensor:
    """A tensor of its own: one over the message's bytes must never be written."""
    view = tensor_from_buffer(DTYPE_NAMES[ref.dtype], ref.rows, ref.columns, ref.row_stride or ref.columns, ref.inline)
    return view.clone(memory_format=torch.contiguous_format)
