"""The same client for asyncio; values, errors and meaning are those of `slotcar_client`.

async with connect("unix:///run/slotcar/slotcar.sock") as client:
    await client.load("sql", "/adapters/sql")
    async with client.session("my engine", model_spec=spec) as session:
        await session.set_mapping([("sql", 3), (BASE, 1)])
        delta = await session.forward({"model.layers.0.self_attn.q_proj": x})

A client belongs to the event loop that it was made in. `rows`, `attach` and `join` are for threads only: a model's
layers call without awaiting.
"""

from slotcar_client.aio.client import AsyncClient, connect
from slotcar_client.aio.events import AsyncEventStream
from slotcar_client.aio.session import AsyncHold, AsyncSession

__all__ = ["AsyncClient", "AsyncEventStream", "AsyncHold", "AsyncSession", "connect"]
