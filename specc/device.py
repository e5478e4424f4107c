"""Facts about the device a model runs on: its name, instruction set, memory bandwidth and default dtype."""

from __future__ import annotations

import logging
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specc.errors import InputError

logger = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DeviceInfo:
    """What a tuning record or a package must know about a device."""

    kind: str  # "cpu" or "cuda"
    name: str
    capability: str  # the instruction set ("AVX2", "AVX512+amx_bf16") or the compute capability ("sm_90")
    cores: int  # threads torch uses, or streaming multiprocessors
    memory_bytes: int | None
    has_fast_bf16: bool


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device to use: the one asked for, else the current GPU where there is one, else the CPU.

    Raises:
        InputError: The name is not a device's, or this machine has no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        device = "cuda" if count else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError("device", device, "'cpu', 'cuda' or 'cuda:N'") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise InputError("device", str(device), "'cpu', 'cuda' or 'cuda:N'")
    index: int | None = found.index
    if (index or 0) >= count:
        raise InputError("device", str(device), f"this machine has {count} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _cpu_flags() -> Mapping[str, Any]:
    """Return torch's view of the CPU's instruction sets; empty where this torch does not tell."""
    read = getattr(torch.cpu, "get_capabilities", None)
    flags: Mapping[str, Any] = read() if read is not None else {}
    return flags


def has_fast_half(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether matrix products in ``dtype`` (bfloat16 or float16) run on instructions made for it."""
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        return major >= (8 if dtype is torch.bfloat16 else 7)
    flags = _cpu_flags()
    if flags.get("architecture", platform.machine()) in {"x86_64", "AMD64"}:
        # oneDNN calls bf16 "supported" from plain AVX-512 on, but emulates it there.
        names = ("amx_bf16", "avx512_bf16") if dtype is torch.bfloat16 else ("amx_fp16", "avx512_fp16")
        return any(bool(flags.get(name)) for name in names)
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def describe(device: torch.device) -> DeviceInfo:
    """Return the facts about ``device``."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return DeviceInfo(
            "cuda",
            found.name,
            f"sm_{found.major}{found.minor}",
            found.multi_processor_count,
            found.total_memory,
            has_fast_half(device),
        )
    flags = _cpu_flags()
    extra = [name for name in ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx_vnni") if flags.get(name)]
    capability = "+".join([torch.backends.cpu.get_cpu_capability(), *extra])
    name = str(flags.get("cpu_name") or platform.processor() or platform.machine())
    return DeviceInfo("cpu", name, capability, torch.get_num_threads(), None, has_fast_half(device))


def default_dtype(checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype used when nobody asked for one: the checkpoint's, unless the device has to emulate it.

    A CPU without bf16 instructions computes a few bf16 rows up to ten times slower than float32 ones, and
    every bf16 value is a float32 value, so float32 is taken there, and said in the log.
    """
    if checkpoint in _HALF and not has_fast_half(device, checkpoint):
        half = str(checkpoint).removeprefix("torch.")
        logger.info(
            "%s has no %s instructions: the weights are used in float32 (pass dtype= to keep %s)",
            describe(device).name,
            half,
            half,
        )
        return torch.float32
    return checkpoint


def measure_bandwidth(device: torch.device, size_bytes: int = 1 << 28, repeats: int = 5) -> float:
    """Return measured read bandwidth in bytes per second: the median of ``repeats`` sums over a large buffer.

    A step reads every weight once, so weights / bandwidth is the floor of its time. ``size_bytes`` must be
    well beyond the last-level cache to mean anything.
    """
    buffer = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(repeats + 1):  # the first pass warms up
        _wait(device)
        start = time.perf_counter()
        buffer.sum()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return buffer.numel() * 4 / statistics.median(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
