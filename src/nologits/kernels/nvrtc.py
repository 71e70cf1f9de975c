"""CUDA C++ kernels at run time: compiled by NVRTC, loaded and launched through the driver (``cuda.bindings``).

A CUDA build of torch brings both packages. Nothing here knows about sampling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor

Defines = tuple[tuple[str, object], ...]

SOURCES = resources.files(__package__) / "sm90"
_OPERAND_TYPES = {
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    torch.int8: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
}


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    ``spilled_bytes``: local memory a thread, 0 where the compiler kept everything in registers. ``remarks``: what the compiler
    said, such as that it had to serialise wgmma.
    """

    function: Any
    threads: int
    shared_bytes: int
    spilled_bytes: int
    remarks: str = ""

    def launch(
        self,
        grid: tuple[int, int],
        arguments: Sequence[Any],
        device: torch.device,
        dependent: bool = False,
        together: bool = False,
    ) -> None:
        """Launches on torch's current stream of ``device``.

        Args:
            grid: blocks in x and y.
            arguments: ctypes objects and tensor maps, one a kernel parameter.
            device: where; its context must be current.
            dependent: may start before the kernel launched before it has ended (it waits on the device).
            together: all blocks run at once, or the launch fails: they may wait for one another.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*(_address(argument) for argument in arguments))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.hStream = torch.cuda.current_stream(device).cuda_stream
        attributes = []
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if together:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if attributes:
            config.attrs, config.numAttrs = attributes, len(attributes)
        check(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0))


def check(result: tuple[Any, ...]) -> Any:
    """The values behind a driver or NVRTC call's status.

    Raises:
        RuntimeError: the call failed.
    """
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{type(status).__name__}: {getattr(status, 'name', status)}")
    return values[0] if len(values) == 1 else tuple(values)


@lru_cache(maxsize=64)
def compile_source(name: str, defines: Defines) -> tuple[bytes, str]:
    """Machine code (cubin) for sm_90a of ``sm90/<name>.cu`` under the macros ``defines``, and the compiler's remarks.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    headers = [entry for entry in SOURCES.iterdir() if entry.name.endswith(".cuh")]
    program = check(
        nvrtc.nvrtcCreateProgram(
            (SOURCES / f"{name}.cu").read_bytes(), f"{name}.cu".encode(), len(headers),
            [header.read_bytes() for header in headers], [header.name.encode() for header in headers],
        )
    )  # fmt: skip
    options = [b"--gpu-architecture=sm_90a", b"-std=c++17", *(f"-D{key}={value}".encode() for key, value in defines)]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
    check(nvrtc.nvrtcGetProgramLog(program, log))
    remarks = log.decode(errors="replace").strip("\0 \n")
    if int(status[0]) != 0:
        raise RuntimeError(f"{name}.cu does not compile with {dict(defines)}:\n{remarks}")
    code: bytes = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, code))
    check(nvrtc.nvrtcDestroyProgram(program))
    return code, remarks


@lru_cache(maxsize=128)
def load(name: str, entry: str, threads: int, shared_bytes: int, defines: Defines, device: int) -> Kernel:
    """The kernel ``entry`` of a compiled source on a device, whose context must be current."""
    code, remarks = compile_source(name, defines)
    module = check(driver.cuModuleLoadData(code))
    function = check(driver.cuModuleGetFunction(module, entry.encode()))
    attribute = driver.CUfunction_attribute
    check(driver.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes))
    check(driver.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    return Kernel(
        function, threads, shared_bytes,
        check(driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function)), remarks,
    )  # fmt: skip


def tensor_map(matrix: Tensor, box_rows: int, box_columns: int) -> Any:
    """Describes ``matrix`` (dense rows) to the copy engine, for boxes in the 128-byte swizzle; zeros beyond its edges."""
    pitch = matrix.stride(0) * matrix.element_size()
    return _encoded(matrix.data_ptr(), matrix.dtype, *matrix.shape, pitch, box_rows, box_columns)


@lru_cache(maxsize=1024)  # operands lie where they lay at the step before
def _encoded(address: int, dtype: torch.dtype, rows: int, columns: int, pitch: int, box_rows: int, box_columns: int) -> Any:
    """It depends on nothing else, and nobody writes to it: whatever lies at the address then is described."""
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    return check(
        driver.cuTensorMapEncodeTiled(
            _OPERAND_TYPES[dtype], 2, address, [u64(columns), u64(rows)], [u64(pitch)],
            [u32(box_columns), u32(box_rows)], [u32(1), u32(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip


def _address(argument: Any) -> int:
    return argument.getPtr() if hasattr(argument, "getPtr") else ctypes.addressof(argument)
