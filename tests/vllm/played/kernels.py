"""How Triton kernels are launched: by Triton's interpreter, on host memory.

Threading: as vLLM launches them, from one thread.
"""

from __future__ import annotations

import os
from typing import Any


def install() -> None:
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
