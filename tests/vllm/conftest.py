"""Fixtures for tests that run a real vLLM. They are left out where vLLM is not installed."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # for `examples` and `tests` when pytest was not started as `python -m pytest`

from tests.faults.conftest import small_filesystem  # noqa: E402, F401 - a fixture; needs the path above
from tests.s3.servers import RcloneServer  # noqa: E402
from tests.vllm.damage import ENGINE_OPTIONS, Reference  # noqa: E402
from tests.vllm.harness import Workshop, start_zygote  # noqa: E402
from tests.vllm.zygote import Zygote  # noqa: E402

if TYPE_CHECKING:
    from tests.vllm.played.engine import PlayedWorkshop


collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test below this directory."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Iterator[None]:
    """Ask no hub for models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module", autouse=True)
def _our_logger() -> Iterator[None]:
    """Keep our logger's lines in ``caplog``. When vLLM loads plugins in this process, ours would redirect them to
    vLLM's handlers, but not if our logger has a handler of its own.
    """
    ours = logging.getLogger("nixl_offload")
    before = (ours.handlers[:], ours.level, ours.propagate)
    ours.addHandler(logging.NullHandler())
    yield
    ours.handlers[:], ours.level, ours.propagate = before


@pytest.fixture
def keep() -> Iterator[Callable[[Any], Any]]:
    """Returns what it is given, and closes it at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda made: stack.enter_context(contextlib.closing(made))


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The process that in-process engines are forked from."""
    with contextlib.closing(start_zygote(tmp_path_factory.mktemp("zygote"))) as made:
        yield made


@pytest.fixture(scope="module")
def workshop(zygote: Zygote) -> Iterator[Workshop]:
    """Makes engines for the tests of a module; ends them all afterwards."""
    with contextlib.closing(Workshop(zygote)) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[RcloneServer]:
    """An S3 server of the module's own."""
    with RcloneServer() as started:
        yield started


@pytest.fixture(scope="session")
def reference(zygote: Zygote) -> Iterator[Reference]:
    """The engine without a connector."""
    with contextlib.closing(Workshop(zygote)) as workshop:
        yield Reference(workshop.start_engine(**ENGINE_OPTIONS))


@pytest.fixture(scope="module")
def played() -> Iterator[PlayedWorkshop]:
    """Starts engines on a played device."""
    from tests.vllm.played.engine import PlayedWorkshop

    made = PlayedWorkshop()
    yield made
    made.close()
