"""What stands in for ``torch.cuda`` and ``torch.accelerator``: one card, whose work is done when a call returns.
Triton's interpreter launches kernels, on host memory.

Threading: any; nothing here keeps state.
"""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import torch

FREE_BYTES, TOTAL_BYTES = 70 << 30, 80 << 30
CAPABILITY = (9, 0)
NAME = "NVIDIA H100 80GB HBM3"


class Event:
    """An event that has always passed."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 0.0


class Stream:
    """A stream that is always idle."""

    cuda_stream = device_index = stream_id = 0
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _: Stream) -> None: ...

    def wait_event(self, _: Event) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> Event:
        return Event()

    def query(self) -> bool:
        return True


_PROPERTIES = SimpleNamespace(
    name=NAME,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=TOTAL_BYTES,
    multi_processor_count=132,
    is_integrated=0,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
)


def install() -> None:
    """Patch torch. ``torch.cuda.is_available`` stays False: nobody can page-lock memory or put a tensor on a card."""
    stream = Stream()
    common = {
        "current_stream": lambda *_: stream,
        "device_count": lambda: 1,
        "set_stream": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "empty_host_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "memory_stats": lambda *_: {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0},
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
    }
    _set(
        torch.cuda,
        **common,
        Event=Event,
        Stream=Stream,
        is_available=lambda: False,
        default_stream=lambda *_: stream,
        stream=lambda _: contextlib.nullcontext(),
        set_device=_nothing,
        current_device=lambda: 0,
        manual_seed=_nothing,
        manual_seed_all=_nothing,
        init=_nothing,
        is_current_stream_capturing=lambda: False,
        get_device_properties=lambda *_: _PROPERTIES,
        get_device_capability=lambda *_: CAPABILITY,
        mem_get_info=lambda *_: (FREE_BYTES, TOTAL_BYTES),
    )
    _set(
        torch.accelerator,
        **common,
        is_available=lambda: True,
        current_device_index=lambda: 0,
        set_device_index=_nothing,
        get_memory_info=lambda *_: (FREE_BYTES, TOTAL_BYTES),
    )
    _set(torch.cuda.memory, get_allocator_backend=lambda: "played")
    _set(torch, Event=Event)
    for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "arange", "empty_strided"):
        setattr(torch, name, _pageable(getattr(torch, name)))
    _set(torch.Tensor, pin_memory=lambda tensor, *_: tensor, is_pinned=lambda *_: True, record_stream=_nothing)
    torch.Tensor.to = _copying(torch.Tensor.to)  # type: ignore[method-assign]


def install_triton() -> None:
    """Make Triton take host memory for a card's. TRITON_INTERPRET is read when Triton is imported."""
    import triton.backends.nvidia.driver as nvidia
    import vllm.platforms
    from triton.runtime import interpreter

    assert os.environ.get("TRITON_INTERPRET") == "1", "TRITON_INTERPRET=1 is missing"
    nvidia.CudaDriver.is_active = staticmethod(lambda: True)  # vLLM uses Triton only where one driver is active
    vllm.platforms.vllm_version_matches_substr = lambda substr: False  # neither is this the vLLM of a CPU
    # A quarter of its time goes into looking for overflows of integers.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # Triton 3.6 converts arrays of one element, which numpy 2.5 refuses.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


def _set(where: Any, **names: Any) -> None:
    for name, value in names.items():
        setattr(where, name, value)


def _nothing(*_: Any, **__: Any) -> None: ...


def _pageable(make: Any) -> Any:
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*arguments, **options)

    return made


def _copying(to: Any) -> Any:
    """A copy between host and card is one here, too: what is written to the source later does not show in it."""

    def copied(tensor: torch.Tensor, *arguments: Any, non_blocking: bool = False, **options: Any) -> torch.Tensor:
        if non_blocking:
            options["copy"] = True
        result: torch.Tensor = to(tensor, *arguments, non_blocking=non_blocking, **options)
        return result

    return copied
