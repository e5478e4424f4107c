"""Devices are named, wrong ones refused, and slow half precision avoided."""

from __future__ import annotations

import logging

import pytest
import torch

from specc import device as device_module
from specc.device import default_dtype, describe, has_fast_half, measure_bandwidth, resolve_device
from specc.errors import InputError

CPU = torch.device("cpu")


def _with_flags(monkeypatch, **flags):
    monkeypatch.setattr(device_module, "_cpu_flags", lambda: {"architecture": "x86_64", **flags})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_without_instructions_becomes_float32(monkeypatch, caplog, dtype):
    _with_flags(monkeypatch, avx512_f=True)
    with caplog.at_level(logging.INFO, logger="specc.device"):
        assert default_dtype(dtype, CPU) is torch.float32
    assert "float32" in caplog.text


def test_the_checkpoints_dtype_is_kept_where_it_is_fast(monkeypatch, caplog):
    _with_flags(monkeypatch, avx512_bf16=True)
    with caplog.at_level(logging.INFO, logger="specc.device"):
        assert default_dtype(torch.bfloat16, CPU) is torch.bfloat16
        assert default_dtype(torch.float32, CPU) is torch.float32
    assert caplog.text == ""
    assert default_dtype(torch.float16, CPU) is torch.float32
    _with_flags(monkeypatch)
    assert default_dtype(torch.float64, CPU) is torch.float64


def test_amx_counts_as_fast(monkeypatch):
    _with_flags(monkeypatch, amx_bf16=True)
    assert has_fast_half(CPU)
    assert not has_fast_half(CPU, torch.float16)


def test_describe_names_the_cpu():
    info = describe(CPU)
    assert info.kind == "cpu"
    assert info.name
    assert torch.backends.cpu.get_cpu_capability() in info.capability
    assert info.cores == torch.get_num_threads()


def test_resolve():
    assert resolve_device("cpu") == CPU
    assert resolve_device("cpu:0") == CPU
    assert resolve_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["tpu!", "mps", "cuda:77", 3.5])
def test_wrong_devices_are_refused(name):
    with pytest.raises(InputError, match="device"):
        resolve_device(name)


def test_bandwidth_is_plausible():
    assert 1e8 < measure_bandwidth(CPU, size_bytes=1 << 24, repeats=3) < 1e13
