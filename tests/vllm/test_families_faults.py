"""Proves for a model that keeps a state that no failure of a shared tier shows.

The state of a boundary and the attention before it are chunks of their own: either may hang, be refused, be damaged or
be gone without the other. While that lasts, and afterwards, answers are those of a vLLM without us; then all is found
again, by the same engine. ``python -m tests.families`` has more of what may befall a tier, and more families.
"""

from __future__ import annotations

import pytest

from tests.families.faults import bucket, directory, try_faults
from tests.families.models import FAMILIES
from tests.families.trial import Trial
from tests.faults.conftest import SmallFilesystem
from tests.s3.proxy import FaultProxy
from tests.s3.servers import RcloneServer
from tests.vllm.harness import Workshop

OF_A_BUCKET = ("GET of state hangs", "GET of attention 404", "GET of state flipped", "PUT of state 503", "refused")
OF_A_DIRECTORY = ("state deleted", "attention cut", "full", "read-only", "unmounted")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def trial(workshop: Workshop) -> Trial:
    """Two states and one attention."""
    made = Trial(workshop, FAMILIES["qwen3-next"], prompts=1, fresh=5)
    assert made.reference().groups == ["MambaSpec", "MambaSpec", "FullAttentionSpec"]
    return made


def test_a_bucket(trial: Trial) -> None:
    """Behind a proxy that breaks requests."""
    with RcloneServer() as server, FaultProxy(server.port) as proxy:
        place = bucket(server, proxy, trial.reference(), "state", "obstore")
        cells = list(try_faults(trial, place, OF_A_BUCKET))
    assert [(cell.case, cell.verdict, cell.note) for cell in cells] == [(name, "same", "") for name in OF_A_BUCKET]


@pytest.mark.parametrize("small_filesystem", [192 << 20], indirect=True)
def test_a_directory(trial: Trial, small_filesystem: SmallFilesystem) -> None:
    """On a filesystem that is filled, made read-only and taken away."""
    place = directory(small_filesystem, trial.reference(), "state")
    cells = list(try_faults(trial, place, OF_A_DIRECTORY))
    assert [(cell.case, cell.verdict, cell.note) for cell in cells] == [(name, "same", "") for name in OF_A_DIRECTORY]
