"""An engine process that can show a model an image: the far end, and the environment that starts it.

Threading: as ``examples.demo.engine_process``.
"""

from __future__ import annotations

from typing import Any, Final

from examples.demo import engine_process
from tests.families.checkpoints import IMAGE_PIXELS
from tests.vllm.zygote import MAIN_MODULE

ENVIRONMENT: Final = {MAIN_MODULE: __name__}
"""For ``Workshop.start_engine``: a forked engine becomes one that has the operation ``show``."""


class VisionHost(engine_process.EngineHost):
    """Owns one ``vllm.LLM`` whose prompts come with what was shown last."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._shown: dict[str, Any] = {}
        generate = self._llm.generate
        self._llm.generate = lambda prompts, *arguments, **options: generate(
            [{**prompt, **self._shown} for prompt in prompts], *arguments, **options
        )

    def show(self, colour: str | None, **more: Any) -> engine_process.Reply:
        """Show an image of one colour from now on, or none; ``more`` are further fields of vLLM's prompts."""
        from PIL import Image

        size = (IMAGE_PIXELS, IMAGE_PIXELS)
        self._shown = {"multi_modal_data": {"image": Image.new("RGB", size, colour)}, **more} if colour else {}
        return {}


def main() -> int:
    """Serve requests from stdin."""
    return engine_process.main(VisionHost)
