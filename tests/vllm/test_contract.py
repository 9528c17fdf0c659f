"""Our classes against vLLM's: which versions are accepted, that overrides take every call, which file touches private
names, and how ranks' reports merge. Starts no engine.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")


from nixl_offload.errors import NotSupportedError
from nixl_offload.types import Outcome
from nixl_offload.vllm import plugin, vllm_internals
from nixl_offload.vllm.connector import NixlOffloadConnector
from nixl_offload.vllm.connector_scheduler import NixlOffloadScheduler
from nixl_offload.vllm.connector_worker import NixlConnectorWorker
from nixl_offload.vllm.manager import NixlOffloadManager
from nixl_offload.vllm.messages import StepMetadata, TicketReport, TicketSpec, WorkerReport
from nixl_offload.vllm.spec import NixlOffloadSpec
from nixl_offload.vllm.worker import NixlOffloadingWorker

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
OFFLOADING = f"{CONNECTOR}.offloading"
OUR_CLASSES = (
    NixlOffloadConnector,
    NixlOffloadScheduler,
    NixlOffloadManager,
    NixlOffloadSpec,
    NixlOffloadingWorker,
    NixlConnectorWorker,
    WorkerReport,
    StepMetadata,
    TicketSpec,
)


def named(path: str) -> Any:
    """``package.module:Class.attribute``, or a failure that says what is gone."""
    module, _, rest = path.partition(":")
    thing = importlib.import_module(module)
    for name in filter(None, rest.split(".")):
        assert hasattr(thing, name), f"this vLLM has no {name} in {path}"
        thing = getattr(thing, name)
    return thing


# Versions.


def test_the_installed_version_is_supported() -> None:
    plugin.check_version()


@pytest.mark.parametrize("text", ["0.32.0", "0.34.0", "0.3.3", "0.330.0", "1.0.0", "dev", ""])
def test_other_versions_are_refused_in_a_sentence_that_names_the_supported_one(text: str) -> None:
    with pytest.raises(NotSupportedError) as refused:
        plugin.check_version(text)
    assert "supports vLLM 0.33" in str(refused.value)
    assert f"this is vLLM {text}" in str(refused.value)


# Our classes against their bases.


def accepts_what_base_takes(ours: Any, base: Any) -> list[str]:
    """Why a call that fits ``base`` may not fit ``ours``: parameters missing, renamed, moved, or newly required."""
    mine, theirs = inspect.signature(ours).parameters, inspect.signature(base).parameters
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in mine.values()):
        return []
    problems = [f"does not take {name!r}" for name in theirs if name not in mine]
    order = [name for name in mine if name in theirs]
    if order != [name for name in theirs if name in mine]:
        problems.append(f"takes {order} in another order")
    problems += [f"requires {name!r}" for name in mine if name not in theirs and mine[name].default is mine[name].empty]
    problems += [
        f"requires {name!r}, which the base leaves optional"
        for name in mine
        if name in theirs and mine[name].default is mine[name].empty and theirs[name].default is not theirs[name].empty
    ]
    return problems


@pytest.mark.parametrize("cls", OUR_CLASSES)
def test_overrides_accept_every_call_that_their_bases_accept(cls: type) -> None:
    assert not inspect.isabstract(cls), f"vLLM asks {cls.__name__} for {sorted(cls.__abstractmethods__)}"
    for name, override in vars(cls).items():
        overridden = next((vars(item)[name] for item in cls.__mro__[1:] if name in vars(item)), None)
        if name.startswith("__") or overridden is None:
            continue
        if isinstance(override, (classmethod, staticmethod)):
            assert type(override) is type(overridden), f"{cls.__name__}.{name} is not what its base is"
        ours, base = (getattr(item, "__func__", item) for item in (override, overridden))
        if inspect.isfunction(ours) and inspect.isfunction(base):
            problems = accepts_what_base_takes(ours, base)
            assert not problems, f"{cls.__name__}.{name} {'; '.join(problems)}"


# Constructors that we go past, and attributes of bases that we read or write.


def private_names_of(cls: type) -> set[str]:
    """Attributes and methods with a leading underscore that the vLLM classes above ``cls`` have."""
    names: set[str] = set()
    for base in (each for each in cls.__mro__ if each.__module__.startswith("vllm.")):
        names.update(vars(base))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_private_names_of_vllm_live_in_one_file() -> None:
    """``vllm_internals`` alone touches them: of vLLM's objects, and of what our classes have from vLLM's."""
    for path in Path(inspect.getfile(vllm_internals)).parent.glob("*.py"):
        if path.name in {"vllm_internals.py", "compare.py"}:  # compare.py asks Python's argparse, not vLLM
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert owner in {"self", "cls"}, f"{path.name}:{node.lineno} touches {ast.unparse(node)}"
    for cls in OUR_CLASSES:
        used = {
            node.attr
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls))))
            if isinstance(node, ast.Attribute)
        }
        used |= set(vars(cls))
        found = used & private_names_of(cls) - {"_abc_impl"}
        assert not found, f"{cls.__name__} touches {sorted(found)}, which are vLLM's"


# Registration, and what vLLM reads out of its extra config.


def test_factories_know_us_by_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    from nixl_offload.config import CONNECTOR_NAME
    from nixl_offload.vllm.plugin import SPEC_NAME, register

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME) is NixlOffloadConnector
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": SPEC_NAME}) is NixlOffloadSpec


def test_loads_within_the_step_are_turned_off() -> None:
    """Where such a load fails, vLLM keeps and stores what was computed from it: wrong answers, seen with both."""
    extra: dict[str, Any] = {"sync_load_budget_bytes": 1 << 20, "other": 1}
    told = vllm_internals.turn_off_loads_within_the_step(extra)
    assert told is not None
    assert "sync_load_budget_bytes is ignored" in told
    assert extra == {"sync_load_budget_bytes": 0, "other": 1}
    assert vllm_internals.turn_off_loads_within_the_step(extra) is None


# Our messages.


def test_reports_of_two_ranks_merge() -> None:
    """Counts add up, a failure on either rank is a failure, CORRUPT outweighs the rest, nothing given is changed."""
    first, second = WorkerReport(), WorkerReport()
    for report in (first, second):
        report.mark_completed(7)
    first.tickets[3] = TicketReport(1, {0: Outcome.CORRUPT, 2: Outcome.FAILED})
    second.tickets[3] = TicketReport(1, {0: Outcome.FAILED, 1: Outcome.DROPPED})
    merged = first.aggregate(second)
    assert isinstance(merged, WorkerReport)
    assert merged.completed_jobs == {7: 2}
    assert merged.tickets[3].ranks == 2
    assert merged.tickets[3].failures == {0: Outcome.CORRUPT, 1: Outcome.DROPPED, 2: Outcome.FAILED}
    assert first.tickets[3].ranks == second.tickets[3].ranks == 1


def test_an_unknown_version_is_refused_before_anything_private_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed import in vLLM must not be what the operator reads; our sentence must."""
    from nixl_offload.config import CONNECTOR_NAME
    from nixl_offload.vllm import plugin

    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with pytest.raises(NotSupportedError, match=r"vLLM 0\.33, and this is vLLM 0\.34\.0"):
        getattr(plugin, CONNECTOR_NAME)
