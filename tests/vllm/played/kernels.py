"""How Triton kernels are launched: by Triton's interpreter on host memory, or compiled for the card and not launched.

Threading: as vLLM launches them, from one thread.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def install(*, compile_only: bool) -> None:
    """Make Triton take host memory for a card's. TRITON_INTERPRET is read when Triton is imported."""
    import triton.backends.nvidia.driver as nvidia
    import vllm.platforms

    nvidia.CudaDriver.is_active = staticmethod(lambda: True)  # vLLM uses Triton only where one driver is active
    vllm.platforms.vllm_version_matches_substr = lambda substr: False  # neither is this the vLLM of a CPU
    if compile_only:
        _compile_only()
    else:
        assert os.environ.get("TRITON_INTERPRET") == "1", "TRITON_INTERPRET=1 is missing"
        _interpret()


def _interpret() -> None:
    from triton.runtime import interpreter

    # A quarter of its time goes into looking for overflows of integers.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # Triton 3.6 converts arrays of one element, which numpy 2.5 refuses.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


def _compile_only() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        """What the compiler asks of a driver."""

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None: ...

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            return torch.cuda

    driver.set_active(Driver())
    run = JITFunction.run
    JITFunction.run = lambda kernel, *arguments, grid, warmup, **options: run(
        kernel, *arguments, grid=grid, warmup=True, **options
    )
    # Nothing fills what kernels would have filled.
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign,assignment]
