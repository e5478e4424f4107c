"""``specc::attend`` for the CPU in C++: reads exactly the cache rows a row may see, once per group of heads.

The source is compiled on first use with the compiler that Inductor uses, and kept beside Inductor's own cache. It
equals the reference in specc.ops up to the order of additions.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.errors import InvariantError, UnsupportedError

_LIB = torch.library.Library("specc", "FRAGMENT")
_LIB.define(
    "attend_cpu(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot, Tensor cache_row, Tensor first, Tensor last, float scale, "
    "float? softcap=None, Tensor? sinks=None, Tensor? path=None) -> Tensor"
)

_SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include <omp.h>

static inline float widen(float x) { return x; }
static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16; float f; std::memcpy(&f, &bits, 4); return f;
}
static inline void narrow(float x, float* out) { *out = x; }
static inline void narrow(float x, uint16_t* out) {
    uint32_t bits; std::memcpy(&bits, &x, 4);
    bits += 0x7fff + ((bits >> 16) & 1);  // round to nearest, ties to even
    *out = (uint16_t)(bits >> 16);
}

template <typename T>
static void attend(const T* q, const T* kc, const T* vc, const int64_t* slot, const int64_t* row,
                   const int64_t* first, const int64_t* last, T* out, int64_t rows, int64_t heads,
                   int64_t kv_heads, int64_t size, int64_t value_size, int64_t cache, float scale,
                   float softcap, const T* sinks, const int64_t* path) {
    const int64_t groups = heads / kv_heads;
    #pragma omp parallel
    {
        std::vector<float> scores, query(size), sum(value_size);
        #pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < rows * kv_heads; ++item) {
            const int64_t n = item / kv_heads, h = item % kv_heads;
            T* o = out + (n * heads + h * groups) * value_size;
            if (row[n] >= cache - 1) {  // garbage: it wrote to the scratch row
                for (int64_t i = 0; i < groups * value_size; ++i) narrow(0.0f, o + i);
                continue;
            }
            const int64_t low = first[n], whole = last[n] - low + 1;
            int64_t count = whole, branch[64];  // a tree's row reads some more, one by one
            if (path)
                for (int64_t i = 0; i < 62; ++i)
                    if (path[n] >> i & 1) branch[count++ - whole] = whole + i;
            const T* k = kc + ((slot[n] * kv_heads + h) * cache + low) * size;
            const T* v = vc + ((slot[n] * kv_heads + h) * cache + low) * value_size;
            scores.resize(count);
            for (int64_t g = 0; g < groups; ++g) {
                const T* qg = q + (n * heads + h * groups + g) * size;
                for (int64_t d = 0; d < size; ++d) query[d] = widen(qg[d]) * scale;
                float highest = sinks ? widen(sinks[h * groups + g]) : -3.0e38f;
                for (int64_t j = 0; j < count; ++j) {
                    const T* kj = k + (j < whole ? j : branch[j - whole]) * size;
                    float s = 0.0f;
                    #pragma omp simd reduction(+ : s)
                    for (int64_t d = 0; d < size; ++d) s += query[d] * widen(kj[d]);
                    if (softcap > 0.0f) s = softcap * std::tanh(s / softcap);
                    scores[j] = s;
                    highest = s > highest ? s : highest;
                }
                float total = sinks ? std::exp(widen(sinks[h * groups + g]) - highest) : 0.0f;
                #pragma omp simd reduction(+ : total)
                for (int64_t j = 0; j < count; ++j) {
                    scores[j] = std::exp(scores[j] - highest);
                    total += scores[j];
                }
                for (int64_t d = 0; d < value_size; ++d) sum[d] = 0.0f;
                for (int64_t j = 0; j < count; ++j) {
                    const T* vj = v + (j < whole ? j : branch[j - whole]) * value_size;
                    const float p = scores[j];
                    #pragma omp simd
                    for (int64_t d = 0; d < value_size; ++d) sum[d] += p * widen(vj[d]);
                }
                const float inverse = 1.0f / total;
                for (int64_t d = 0; d < value_size; ++d) narrow(sum[d] * inverse, o + g * value_size + d);
            }
        }
    }
}

extern "C" void specc_attend(
    const void* q, const void* kc, const void* vc, const int64_t* slot, const int64_t* row, const int64_t* first,
    const int64_t* last, void* out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t size, int64_t value_size,
    int64_t cache, float scale, float softcap, const void* sinks, const int64_t* path, int is_bf16) {
    if (is_bf16)
        attend((const uint16_t*)q, (const uint16_t*)kc, (const uint16_t*)vc, slot, row, first, last, (uint16_t*)out,
               rows, heads, kv_heads, size, value_size, cache, scale, softcap, (const uint16_t*)sinks, path);
    else
        attend((const float*)q, (const float*)kc, (const float*)vc, slot, row, first, last, (float*)out,
               rows, heads, kv_heads, size, value_size, cache, scale, softcap, (const float*)sinks, path);
}
"""

DTYPES = (torch.float32, torch.bfloat16)


# Compiled and linked apart: linking with -ffast-math would switch the whole process to flushed denormals.
_COMPILE = ("-c", "-O3", "-ffast-math", "-fopenmp", "-fPIC", "-std=c++17")
_LINK = ("-shared", "-fopenmp", "-Wl,-s,--build-id=none,-z,noexecstack")
_HERE = ("-march=native",)
SOURCE_SHA256 = hashlib.sha256(_SOURCE.encode()).hexdigest()

# The function of this process, once it is there: the operator is one for the whole process, and so is its kernel.
_loaded: list[Any] = []


def kernel() -> Any:
    """Return the compiled function, compiling it on first use; UnsupportedError if the compiler fails."""
    if not _loaded:
        _loaded.append(_function(_library()))
    return _loaded[0]


def use(library: Path) -> None:
    """Take the kernel from a library that `build` made of this source, unless this process has one.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: it does not hold the kernel.
    """
    if not _loaded:
        _loaded.append(_function(library))


def _function(library: Path) -> Any:
    function = ctypes.CDLL(str(library)).specc_attend
    pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    function.argtypes = [*[pointer] * 8, *[integer] * 6, real, real, pointer, pointer, ctypes.c_int]
    function.restype = None
    return function


def _library() -> Path:
    """Return the shared library, named by all that it depends on, in Inductor's cache folder."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    machine = (
        f"{platform.machine()} {torch.cpu.get_capabilities()}"
        if hasattr(torch.cpu, "get_capabilities")
        else ""
    )
    parts = [_SOURCE, get_cpp_compiler(), *_COMPILE, *_HERE, *_LINK, machine]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    folder = Path(cache_dir()) / "specc"
    path = folder / f"attend_{key}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        build(Path(scratch), _HERE).replace(path)
    return path


def build(folder: Path, machine: Sequence[str]) -> Path:
    """Compile the kernel into a shared library in ``folder``; the same compiler gives the same bytes anywhere.

    Args:
        folder: an empty one.
        machine: the compiler's options that say which instructions there are.

    Raises:
        UnsupportedError: the compiler fails.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    (folder / "attend.cpp").write_text(_SOURCE)
    for command in (
        [*_COMPILE, *machine, "attend.cpp", "-o", "attend.o"],
        [*_LINK, "attend.o", "-o", "attend.so"],
    ):
        done = subprocess.run(
            [get_cpp_compiler(), *command], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            errors = done.stderr.strip().splitlines()[:5]
            raise UnsupportedError("the CPU attention kernel cannot be compiled", errors)
    return folder / "attend.so"


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot: Tensor,
    cache_row: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    path: Tensor | None = None,
) -> Tensor:
    if key_cache.dtype not in DTYPES or not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise InvariantError(
            "attend_cpu takes contiguous float32 or bfloat16 caches", key_cache.dtype, "attend_cpu"
        )
    key_cache[slot, :, cache_row] = key
    value_cache[slot, :, cache_row] = value
    rows, heads, size = query.shape
    out = query.new_empty(rows, heads, value.shape[2])
    query = query.contiguous()
    indices = [t.contiguous() for t in (slot, cache_row, first, last)]
    sinks = None if sinks is None else sinks.to(query.dtype).contiguous()
    path = None if path is None else path.contiguous()
    kernel()(
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        *(t.data_ptr() for t in indices),
        out.data_ptr(),
        rows,
        heads,
        key.shape[1],
        size,
        value.shape[2],
        key_cache.shape[2],
        scale,
        softcap or 0.0,
        None if sinks is None else sinks.data_ptr(),
        None if path is None else path.data_ptr(),
        int(query.dtype is torch.bfloat16),
    )
    return out


_LIB.impl("attend_cpu", _attend, "CPU")
torch.library.register_fake(
    "specc::attend_cpu",
    lambda query, key, value, *_: query.new_empty(*query.shape[:2], value.shape[2]),
    lib=_LIB,
)
attend_cpu = torch.ops.specc.attend_cpu
