"""The tensors of a Forward as the caller gave them: which sites they are for, and whether they fit these.

Invariant: the aux of a call that `with_aux` made has int32 indices in the model's range, [rows], on the CPU; and where
the session knows no model, whatever integers there are.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from slotcar_client.convert import DTYPE_NAMES
from slotcar_client.effects import ForwardCall
from slotcar_client.errors import RequestInvalid, ShapeMismatch, SiteUnknown
from slotcar_client.sites import Model, RankSite

__all__ = ["check_given", "check_sites", "dtype_of", "first_tensor", "sites_of", "with_aux"]

_INTEGERS = (torch.int32, torch.int64)
_MOST = torch.iinfo(torch.int32).max + 1
_FLOATS = tuple(getattr(torch, name) for name in DTYPE_NAMES.values())


def sites_of(call: ForwardCall) -> tuple[str, ...]:
    """The sites that a call is for: those with an input, then those that have indices in its place."""
    inputs, aux = call.inputs, call.aux
    return (*inputs, *(site for site in aux if site not in inputs)) if aux else tuple(inputs)


def first_tensor(call: ForwardCall, site: str) -> torch.Tensor:
    """The one that says the site's dtype and device: x, else the base, else the aux."""
    for tensors in (call.inputs, call.base, call.aux):
        if tensors is not None and site in tensors:
            return tensors[site]
    raise AssertionError(f"{site} is no site of the call")


def dtype_of(call: ForwardCall, site: str) -> torch.dtype:
    """Of the site's result."""
    dtype = first_tensor(call, site).dtype
    return call.out_dtype if dtype in _INTEGERS and call.out_dtype is not None else dtype


def check_sites(call: ForwardCall) -> None:
    """Raises RequestInvalid unless there is a site, and a base for each or for none."""
    sites = sites_of(call)
    if not sites:
        raise RequestInvalid("no site: give at least one", field="inputs", found="no site", wanted="at least one")
    if call.base is not None and call.base.keys() != set(sites):
        found, wanted = (", ".join(sorted(names)) for names in (call.base, sites))
        raise RequestInvalid("base has other sites than the inputs", field="base", found=found, wanted=wanted)


def check_given(call: ForwardCall, name: str, site: RankSite) -> None:
    """Raises RequestInvalid unless the call has for the site what its kind wants, and nothing else."""
    has_x, has_aux = name in call.inputs, call.aux is not None and name in call.aux
    if site.is_embedding and has_x:
        raise _invalid(f"x of {name}", "a tensor", "nothing: an embedding has ids in aux")
    if not site.is_embedding and not has_x:
        raise _invalid(f"x of {name}", "nothing", "a tensor [rows, features]")
    if site.indices and not has_aux:
        raise _invalid(f"aux of {name}", "nothing", site.indices_are)
    if has_aux and not site.indices and call.base is not None:
        raise _invalid(f"aux of {name}", "a tensor", "nothing beside its base, which is the same")


def with_aux(call: ForwardCall, model: Model | None) -> ForwardCall:
    """The call with its aux checked and ready to be sent; embeddings without a base get the model's dtype.

    model: None when the session knows none. Raises RequestInvalid, ShapeMismatch or SiteUnknown.
    """
    given = call.aux or {}
    check_sites(call)
    call = replace(call, out_dtype=getattr(torch, model.dtype if model is not None else "float32"))
    for name in sites_of(call) if model is not None else ():
        assert model is not None
        if name not in model.sites:
            raise SiteUnknown(f"the model has no site {name!r}", site=name)
        check_given(call, name, model.sites[name])
    rows = sum(call.row_counts)
    aux = {
        name: _checked(call, name, tensor, rows, None if model is None else model.sites[name])
        for name, tensor in given.items()
    }
    return replace(call, aux=aux)


def _checked(call: ForwardCall, name: str, tensor: torch.Tensor, rows: int, site: RankSite | None) -> torch.Tensor:
    field, is_index = f"aux of {name}", not tensor.is_floating_point() if site is None else site.indices > 0
    if is_index:
        if tensor.dtype not in _INTEGERS:
            raise _mismatch(f"{field} is {_said(tensor.dtype)}", field, _said(tensor.dtype), "int32 or int64")
        if tensor.shape != (rows,):
            raise _mismatch(f"{field} is {list(tensor.shape)}", field, list(tensor.shape), [rows])
        return _in_range(field, tensor.detach().cpu(), _MOST if site is None else site.indices)
    wanted = dtype_of(call, name)
    if tensor.dtype != wanted or wanted not in _FLOATS:
        raise _mismatch(f"{field} is {_said(tensor.dtype)}", field, _said(tensor.dtype), _said(wanted))
    if site is not None and tensor.shape != (rows, site.out_features):
        raise _mismatch(f"{field} is {list(tensor.shape)}", field, list(tensor.shape), [rows, site.out_features])
    return tensor


def _in_range(field: str, indices: torch.Tensor, below: int) -> torch.Tensor:
    if indices.numel():
        least, most = (int(value) for value in torch.aminmax(indices))
        if least < 0 or most >= below:
            found = least if least < 0 else most
            raise RequestInvalid(
                f"{field} has {found}, wanted 0 to {below - 1}", field=field, found=found, wanted=f"0 to {below - 1}"
            )
    return indices.to(torch.int32).contiguous()


def _invalid(field: str, found: str, wanted: str) -> RequestInvalid:
    return RequestInvalid(f"{field} is {found}, wanted {wanted}", field=field, found=found, wanted=wanted)


def _mismatch(message: str, field: str, found: object, wanted: object) -> ShapeMismatch:
    return ShapeMismatch(f"{message}, wanted {wanted}", field=field, found=found, wanted=wanted)


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
