"""Memory that two processes share through a driver: what is mapped, for what, for how long, and what fails how."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from slotcar_kernels import vmm
from slotcar_kernels.vmm import Driver, DriverError, OutOfGpuMemory

from tests.fakes.libcuda import library, on_host
from tests.kernels.triton.environment import FOLDER

MEBIBYTE = 1 << 20
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def driver() -> Driver:
    return Driver(library())


def lines() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text("ascii").splitlines() if "memfd:fake-gpu" in line]


def descriptors() -> int:
    """How many there are of a GPU's memory; others come and go with what ran before."""
    links = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum("memfd:fake-gpu" in os.readlink(file) for file in links)  # noqa: PTH115 - it names no file


def test_what_one_has_written_the_other_reads(driver: Driver) -> None:
    made = driver.make(0, 3 * MEBIBYTE)
    assert made.size_bytes == 4 * MEBIBYTE, "a multiple of the granularity"
    assert made.descriptor is not None
    taken = driver.take(0, made.descriptor, made.size_bytes)
    here, there = on_host(made), on_host(taken)
    here.copy_(torch.arange(len(here)).to(torch.uint8))
    assert torch.equal(here, there)
    assert sorted(line.split()[1] for line in lines()) == ["r--s", "rw-s"]


def test_memory_outlives_who_made_it_and_goes_with_its_last_reader(driver: Driver) -> None:
    before, finished = descriptors(), []
    made = driver.make(0, MEBIBYTE)
    assert made.descriptor is not None
    taken = driver.take(0, made.descriptor, made.size_bytes, lambda: finished.append(len(lines())))
    on_host(made).fill_(7)
    there = on_host(taken)
    del made, taken
    gc.collect()
    assert there[-1] == 7
    assert (len(lines()), descriptors()) == (1, before)
    del there
    gc.collect()
    assert finished == [1], "it was asked while the memory was mapped"
    assert lines() == []


def test_released_memory_is_gone_at_once(driver: Driver) -> None:
    made = driver.make(0, MEBIBYTE)
    made.release()
    made.release()
    assert lines() == []


READER = """
import socket, sys
from slotcar_kernels.vmm import Driver
from tests.fakes.libcuda import on_host
link = socket.socket(fileno=int(sys.argv[1]))
data, received, _, _ = socket.recv_fds(link, 16, 1)
driver = Driver(sys.argv[2])
there = on_host(driver.take(driver.device_of(b"A" * 16), received[0], int(data)))
print(int(there.sum()), flush=True)
if sys.argv[3] == "write":
    there[0] = 1
"""


@pytest.mark.parametrize("does", ["read", "write"])
def test_another_process_reads_and_cannot_write(driver: Driver, does: str) -> None:
    made = driver.make(0, MEBIBYTE)
    assert made.descriptor is not None
    on_host(made).fill_(3)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [str(made.size_bytes).encode()], [made.descriptor])
        number = theirs.fileno()
        done = subprocess.run(
            [sys.executable, "-c", READER, str(number), library(), does],
            pass_fds=[number],
            env=os.environ | {"FAKE_CUDA_GPUS": "BA"},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout == f"{3 * made.size_bytes}\n", done.stderr
    assert done.returncode == (0 if does == "read" else -11)
    assert on_host(made)[0] == 3


CALLS = ("cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve")


@pytest.mark.parametrize("call", [*CALLS, "cuMemMap", "cuMemSetAccess"])
def test_a_call_that_fails_is_named_and_leaves_nothing(
    driver: Driver, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"{call}=801")
    before = descriptors()
    with pytest.raises(DriverError, match=f"^{call}: CUDA_ERROR_801$"):
        driver.make(0, MEBIBYTE)
    assert (descriptors(), lines()) == (before, [])


@pytest.mark.parametrize(("attribute", "what"), [(102, "mapped"), (103, "exported by descriptors")])
def test_a_gpu_that_cannot_is_asked_for_nothing(
    driver: Driver, attribute: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"cuDeviceGetAttribute:{attribute}=1")
    with pytest.raises(DriverError, match=f"memory of GPU 0 cannot be {what}"):
        driver.make(0, MEBIBYTE)


def test_more_than_there_is(driver: Driver) -> None:
    with pytest.raises(OutOfGpuMemory, match="cuMemCreate: CUDA_ERROR_2"):
        driver.make(0, 2 << 30)


def test_what_is_no_memory_of_a_gpu(driver: Driver, tmp_path: Path) -> None:
    before = descriptors()
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(100)
        with pytest.raises(DriverError, match="cuMemImportFromShareableHandle: CUDA_ERROR_1"):
            driver.take(0, file.fileno(), 2 * MEBIBYTE)
    made = driver.make(0, MEBIBYTE)
    assert made.descriptor is not None
    with pytest.raises(DriverError, match="cuMemMap: CUDA_ERROR_1"):
        driver.take(0, made.descriptor, 2 * made.size_bytes)
    made.release()
    assert (descriptors(), lines()) == (before, [])


def test_gpus_are_known_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_GPUS", "CAB")
    driver = Driver(library())
    assert [driver.device_of(letter * 16) for letter in (b"A", b"B", b"C", b"D")] == [1, 2, 0, None]


@pytest.mark.parametrize("name", ["libcuda-that-there-is-not.so", "libc.so.6"])
def test_there_may_be_no_driver(name: str) -> None:
    with pytest.raises(DriverError, match=f"CUDA's driver cannot be used: .*{name}"):
        Driver(name)


LAYOUTS = """
#include <cuda.h>
#include <cstddef>
#define IS(what, number) static_assert((what) == number, #what)
IS(sizeof(CUmemAllocationProp), %(properties)d);
IS(offsetof(CUmemAllocationProp, requestedHandleTypes), %(handle_types)d);
IS(offsetof(CUmemAllocationProp, location), %(location)d);
IS(offsetof(CUmemAllocationProp, win32HandleMetaData), %(windows)d);
IS(sizeof(CUmemAccessDesc), %(access)d);
IS(offsetof(CUmemAccessDesc, flags), %(flags)d);
IS(sizeof(CUmemGenericAllocationHandle), 8);
IS(sizeof(CUdeviceptr), 8);
IS(sizeof(CUuuid), 16);
IS(CUDA_ERROR_OUT_OF_MEMORY, %(_OUT_OF_MEMORY)d);
IS(CU_MEM_LOCATION_TYPE_DEVICE, %(_DEVICE)d);
IS(CU_MEM_ALLOCATION_TYPE_PINNED, %(_PINNED)d);
IS(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, %(_DESCRIPTOR)d);
IS(CU_MEM_ALLOC_GRANULARITY_MINIMUM, %(_MINIMUM)d);
IS(CU_MEM_ACCESS_FLAGS_PROT_READ, %(_READ)d);
IS(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, %(_READ_AND_WRITE)d);
IS(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, %(_HAS_MAPPING)d);
IS(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, %(_HAS_DESCRIPTORS)d);
"""


def test_layouts_and_numbers_are_those_of_the_drivers_header(tmp_path: Path) -> None:
    headers = sorted(FOLDER.glob("*/triton/backends/nvidia/include/cuda.h"))
    if not headers or shutil.which("g++") is None:
        pytest.skip("no cuda.h here: make .triton/3.6.0/.installed")
    properties, access = vmm._Properties, vmm._Access
    sizes = {"properties": ctypes.sizeof(properties), "access": ctypes.sizeof(access), "flags": access.flags.offset}
    sizes |= {name: getattr(properties, name).offset for name in ("handle_types", "location", "windows")}
    source = tmp_path / "layouts.cpp"
    source.write_text(LAYOUTS % (vars(vmm) | sizes))
    for header in headers:
        subprocess.run(["g++", "-fsyntax-only", f"-I{header.parent}", source], check=True)
