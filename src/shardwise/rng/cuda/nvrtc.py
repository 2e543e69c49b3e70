"""Compiles CUDA C at run time and launches kernels on torch's current stream.

Needs NVRTC and the driver library, which torch uses itself, but no CUDA toolkit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from shardwise.torch_private import current_raw_stream

__all__ = ["BLOCK", "CompilerError", "Kernel", "can_compile", "compile_kernel"]

BLOCK = 256  # threads in a block of every launch


class CompilerError(RuntimeError):
    """No compiler is available, or the compilation failed."""


class Kernel:
    """A kernel on one device."""

    def __init__(self, device: torch.device, image: bytes, name: str) -> None:
        self._device = device
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # creates the device's context, which the module needs
            _driver_call("cuModuleLoadData", ctypes.byref(self._module), image)
            _driver_call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())

    def launch(self, threads: int, arguments: Sequence[Any]) -> None:
        """Run on at least `threads` threads. The arguments are ctypes objects of the kernel's parameter types."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        stream = ctypes.c_void_p(current_raw_stream(self._device.index))
        grid = -(-threads // BLOCK)
        with _current(self._device):
            _driver_call("cuLaunchKernel", self._function, grid, 1, 1, BLOCK, 1, 1, 0, stream, pointers, None)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make the device current; does nothing if it is already."""
    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def compile_kernel(source: str, name: str, macros: Sequence[tuple[str, object]], device: torch.device) -> Kernel:
    """Compile the kernel `name` of `source` for the device, with macros."""
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}", *(f"-D{macro}={value}" for macro, value in macros)]
    return Kernel(device, _machine_code(source, options), name)


@cache
def can_compile(device: torch.device) -> bool:
    """Whether a compiler is available that supports the device."""
    try:
        compile_kernel('extern "C" __global__ void nothing() {}', "nothing", (), device)
    except CompilerError:
        return False
    return True


def _machine_code(source: str, options: Sequence[str]) -> bytes:
    library = _compiler()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"shardwise.cu", 0, None, None), "")
    try:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if error := library.nvrtcCompileProgram(program, len(options), encoded):
            _check(error, _output(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode())
        return _output(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _output(get_size: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(get_size(program, ctypes.byref(size)), "")
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer), "")
    return buffer.raw


def _check(error: int, log: str) -> None:
    if error:
        raise CompilerError(f"NVRTC returned error {error}. {log}")


@cache
def _compiler() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise CompilerError("This torch is not built for CUDA.")
    try:
        return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")
    except OSError as error:
        raise CompilerError(f"NVRTC is not found: {error}") from error


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver_call(function: str, *arguments: Any) -> None:
    if error := getattr(_driver(), function)(*arguments):
        raise RuntimeError(f"{function} returned CUDA error {error}.")
