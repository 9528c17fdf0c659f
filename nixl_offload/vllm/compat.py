"""Which version of vLLM is accepted: one minor version, for our half depends on vLLM's internals.

Threading: pure functions. Importing this imports no vLLM, so that commands can ask without one.
"""

from __future__ import annotations

import re
from typing import Final

from nixl_offload.errors import NotSupportedError

SUPPORTED: Final = "0.33"
"""The minor version that is accepted. ``docs/decisions/0007-vllm-versions.md`` says how to move to the next."""
PIP_REQUIREMENT: Final = "vllm>=0.33,<0.34"
"""What pip installs it by."""


def is_supported(version: str) -> bool:
    """Return whether a version of vLLM, as it names itself, is the supported one."""
    return re.match(rf"{re.escape(SUPPORTED)}(?!\d)", version) is not None


def check_version(version: str | None = None) -> None:
    """Raise NotSupportedError, naming the supported version, when ``version`` (the running vLLM's) is another one.

    vLLM's internals decide whether a failed load ends as a recompute or as a dead engine, so guessing is no option.
    """
    if version is None:
        import vllm

        version = vllm.__version__
    if not is_supported(version):
        raise NotSupportedError(
            f"nixl-offload supports vLLM {SUPPORTED}, and this is vLLM {version}; "
            f'run pip install "{PIP_REQUIREMENT}", or install a nixl-offload that names {version} in its release notes'
        )
