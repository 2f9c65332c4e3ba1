"""A process whose slots on a GPU another one reads: `python -m tests.gpu.writer SOCKET`, which sends their descriptors.

Commands on its standard input: "begin SLOT", "write SLOT SEED", "end SLOT" are the steps of a load; "forward SLOT ..."
says what the device computes for rows of these slots. Each answer is a line: a generation, or a digest of all bits.
"""

from __future__ import annotations

import hashlib
import socket
import sys

import torch
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import Epoch, SlotId
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.device.cuda.device import CudaDevice
from slotcar_sidecar.device.cuda.machine import Gpu

from tests.fakes.libcuda import library
from tests.fakes.machine import HostMachine
from tests.fakes.weights import FakeWeights, fake_weights
from tests.gpu.place import DEVICE
from tests.unit.device.kinds import to_matrix, to_tensor

EPOCH = "0123456789abcdef"
MODEL = ModelSpec.of([Site("k", 32, 24), Site("q", 32, 40)])
SITES = tuple(site.name for site in MODEL.sites)
SLOTS, MAX_RANK, DTYPE = 3, 32, "float32"


def weights(seed: int) -> FakeWeights:
    return fake_weights(MODEL, {"k": 3, "q": 17}, seed=seed)


def rows(count: int) -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(0))[:count]


def digest(outs: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(out.cpu().contiguous().numpy().tobytes() for out in outs)).hexdigest()


class Writer:
    def __init__(self) -> None:
        machine = Gpu() if DEVICE.type == "cuda" else HostMachine(library())
        self.device = CudaDevice(machine, SLOTS, MAX_RANK, DTYPE, poison=True, epoch=EPOCH)
        self.device.shape(MODEL)
        self.layout = Layout.empty(Epoch(EPOCH), SLOTS)
        self.publish(self.layout)

    def publish(self, layout: Layout) -> int:
        self.layout = layout
        self.device.publish(layout)
        return layout.generation

    def do(self, command: str, *numbers: int) -> object:
        slot = SlotId(numbers[0])
        if command == "begin":
            return self.publish(self.layout.begin_fill(slot, weights(1).adapter.digest))
        if command == "write":
            return self.device.fill(slot, weights(numbers[1]))
        if command == "end":
            return self.publish(self.layout.occupy(slot))
        assert command == "forward"
        x = to_matrix(rows(len(numbers)))
        batch = self.device.prepare([(SlotId(slot), 1) for slot in numbers], [ForwardItem(site, x) for site in SITES])
        return digest([to_tensor(out) for out in self.device.execute(batch)])


def main() -> None:
    writer, link = Writer(), socket.socket(fileno=int(sys.argv[1]))
    file, memory = writer.device.file, writer.device.memory
    assert memory is not None
    assert file is not None, memory.why_not
    socket.send_fds(link, [b"slots"], [file.descriptor, memory.descriptor])
    for line in sys.stdin:
        command, *numbers = line.split()
        print(writer.do(command, *map(int, numbers)), flush=True)


if __name__ == "__main__":
    main()
