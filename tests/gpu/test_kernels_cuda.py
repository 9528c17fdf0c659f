"""Proves on a GPU: Triton's kernels and torch's copy exactly the given bytes and sum as the ``xxhash`` library does,
also beyond 4 GiB. No number of blocks makes them compile again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nixl_offload.engine.kernels.torch_kernels import Page, TorchKernels, open_kernels
from tests.unit.kernels_rig import IDS, SHAPES, TARGETS, Group, check, digests, group_of, slot_of

pytestmark = pytest.mark.gpu

MORE_SHAPES = {
    "many layers": ([65536] * 32, 0, 0, 0, 8192),
    "one page": ([2 << 20], 0, 0, 0, 8192),
    "DeepSeek's": ([41984] * 8, 0, 0, 0, 1024),
    "at odd words": ([2048, 4096], 8, 0, 0, None),
}
BEYOND_BYTES = 9 << 29
"""4.5 GiB: a 32-bit offset, signed or not, would wrap around."""


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def triton_of(group: Group) -> TorchKernels:
    kernels = open_kernels(group.tensors, group.pages)
    assert kernels.name == "triton", "they did not pass their test; the log says why"
    return kernels


@pytest.mark.parametrize("shape", [*SHAPES, *MORE_SHAPES])
def test_triton_and_torch_copy_and_sum_exactly(shape: str) -> None:
    """As in Triton's interpreter: blocks and rows are not contiguous, with other memory around them."""
    sizes, gap, shift, offset, _ = (SHAPES | MORE_SHAPES)[shape]
    group = group_of(sizes, gap=gap, shift=shift, offset=offset, device="cuda")
    rows = slot_of(5, group.block_bytes, gap=16, shift=16, device="cuda")
    for kernels in (triton_of(group), TorchKernels(group.tensors, group.pages)):
        check(kernels, group, rows, IDS, TARGETS)
        for memory, before in zip(group.memory, group.before, strict=True):
            memory.copy_(before)


def test_blocks_that_are_no_words_are_torch_s() -> None:
    group = group_of([1001], device="cuda")
    kernels = open_kernels(group.tensors, group.pages)
    assert kernels.name == "torch"
    check(kernels, group, slot_of(2, 1001, device="cuda"), [3, 1], [0, 2])


@pytest.mark.parametrize("beyond", [-16, 0, 16])
def test_rows_of_every_length(beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths around every boundary of stripes, rounds and programs."""
    for length in [256, 272, 320, *(1024 * n + beyond for n in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 2048))]:
        group = group_of([length], blocks=5, gap=16, device="cuda")
        kernels = triton_of(group)
        with monkeypatch.context() as patch:
            patch.delattr(TorchKernels, "sums_of_rows")
            found = kernels.sums_of_rows(group.tensors[0])
        assert torch.equal(found.cpu(), digests(group.tensors[0].cpu())), length


def test_blocks_beyond_four_gigabytes() -> None:
    """Offsets of blocks and rows need more than 32 bits."""
    page_bytes = 1 << 20
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < 3 * BEYOND_BYTES:
        pytest.skip(f"{free_bytes >> 30} GiB free")
    blocks = BEYOND_BYTES // page_bytes
    tensor = torch.empty((blocks, page_bytes), dtype=torch.uint8, device="cuda")
    tensor.view(torch.int64).random_()
    kernels = open_kernels([tensor], [Page(0, 0, page_bytes)])
    assert kernels.name == "triton"
    ids = torch.tensor([blocks - 1, 0, 2049, 4097, blocks // 2])
    wanted = tensor[ids.cuda()].cpu()
    far = torch.zeros((blocks, page_bytes), dtype=torch.uint8, device="cuda")
    rows = torch.as_strided(far, (5, page_bytes), (page_bytes * (blocks - 1) // 4, 1))
    kernels.gather(ids.cuda(), rows)
    assert torch.equal(rows.cpu(), wanted)
    assert torch.equal(kernels.sums(ids.cuda()).cpu(), digests(wanted))
    assert torch.equal(kernels.sums_of_rows(rows).cpu(), digests(wanted))
    targets = torch.tensor([4098, blocks - 2, 5, 2050, 3])
    kernels.scatter(targets.cuda(), rows)
    assert torch.equal(tensor[targets.cuda()].cpu(), wanted)
    assert torch.equal(tensor[ids.cuda()].cpu(), wanted)


def test_work_goes_to_the_stream_that_is_current() -> None:
    """A gather on a side stream sees earlier writes of that stream, and does not wait for another stream."""
    group = group_of([8192], device="cuda")
    kernels = triton_of(group)
    rows = slot_of(1, 8192, device="cuda")
    ids = torch.tensor([4], device="cuda")
    _everything(kernels, ids, rows)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    other = torch.cuda.Event()
    other.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        group.tensors[0].fill_(7)
        kernels.gather(ids, rows)
        found = kernels.sums_of_rows(rows)
        torch.cuda.current_stream().synchronize()
        assert not other.query()
        assert torch.equal(found.cpu(), digests(torch.full((1, 8192), 7, dtype=torch.uint8)))


def test_no_number_of_blocks_compiles_anew() -> None:
    """An address does not either: by default Triton compiles specially for some numbers and pointers."""
    from nixl_offload.engine.kernels import triton_code

    group = group_of([8192, 4096], blocks=40, device="cuda")
    kernels = triton_of(group)

    def compilations() -> int:
        functions: list[Any] = [triton_code.copy_tiles, triton_code.sum_rounds, triton_code.fold_rounds]
        return sum(len(cache[0]) for function in functions for cache in function.device_caches.values())

    before = compilations()
    ids = torch.arange(40, device="cuda")
    for begin, count in ((0, 1), (1, 2), (3, 16), (1, 17), (0, 32)):
        _everything(kernels, ids[begin : begin + count], slot_of(count, 12288, shift=16 * count, device="cuda"))
    assert compilations() == before > 0


def _everything(kernels: TorchKernels, ids: torch.Tensor, rows: torch.Tensor) -> None:
    kernels.gather(ids, rows)
    kernels.sums(ids)
    kernels.sums_of_rows(rows)
    kernels.scatter(ids, rows)
