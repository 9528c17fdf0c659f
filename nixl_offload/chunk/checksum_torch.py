"""The checksum of stored blocks where they lie: XXH3-64 (seed 0) in torch integer arithmetic, for CPU and CUDA
tensors alike.

One value with ``checksum``: for blocks above 240 bytes XXH3 adds, per kilobyte, sixteen products into each of eight
lanes and then scrambles the lanes. What is added does not depend on the lanes' state, so all kilobytes of all blocks
are summed at once and only the scrambling, eight words per kilobyte, runs in order. Torch has no unsigned 64-bit
arithmetic: int64 wraps around to the same bits.
Threading: pure functions on the caller's current stream. ``xxh3_64_torch`` waits for the device once, when it first
meets it (``words_on``), and never again.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

SHORT_BYTES = 240
"""Up to this length XXH3 is another function, which only the host computes: no KV block is so short."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3's default secret: 192 bytes, part of the algorithm."""

PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_AVALANCHE = 0x165667919E3779F9

_LANES = 8
_STRIPE_BYTES = 64
_STRIPES = 16
"""Stripes between two scrambles: the secret moves on by eight bytes per stripe."""
ROUND_BYTES = _STRIPES * _STRIPE_BYTES

SCRAMBLE_KEY, LAST_KEY, MERGE_KEY, START = 16, 24, 32, 40
"""Where the table of ``words_on`` holds the eight words of a scramble, of the last stripe, of the merge, and the lanes'
first values. The key of stripe s is the eight words from s on."""
_WORDS = np.concatenate(
    [
        np.frombuffer(_SECRET, dtype="<u8"),
        np.frombuffer(_SECRET, dtype="<u8", count=_LANES, offset=len(_SECRET) - _STRIPE_BYTES - 7),
        np.frombuffer(_SECRET, dtype="<u8", count=_LANES, offset=11),
        np.array(
            [_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, PRIME32_1],
            dtype=np.uint64,
        ),
    ]
)
_SLICE_BYTES = 32 << 20
"""Payload summed at a time; the scratch memory is about four times as much."""


def xxh3_64_torch(rows: torch.Tensor) -> torch.Tensor:
    """Return XXH3-64 of every row of ``rows``, uint8 of shape ``(n, length)``, as int64 of shape ``(n,)`` with the
    same 64 bits.

    Works on the tensor's device and does not wait for it. Rows that are contiguous, begin at a multiple of eight
    bytes and lie such a multiple apart are read in place; others are copied first. Raises ValueError for another
    type, shape, or a length up to 240.
    """
    if rows.dtype != torch.uint8 or rows.dim() != 2:
        raise ValueError(f"rows must be uint8 of shape (n, length), not {rows.dtype} {tuple(rows.shape)}")
    length = rows.shape[1]
    if length <= SHORT_BYTES:
        raise ValueError(f"rows must be longer than {SHORT_BYTES} bytes, not {length}")
    words = words_on(rows.device)
    rounds = (length - 1) // ROUND_BYTES
    tail_stripes = (length - 1 - rounds * ROUND_BYTES) // _STRIPE_BYTES
    keys = words.unfold(0, _LANES, 1)[:_STRIPES]
    scramble_key = words[SCRAMBLE_KEY : SCRAMBLE_KEY + _LANES]

    accumulators = words[START : START + _LANES].expand(rows.shape[0], _LANES)
    for sums in _round_sums(rows, rounds, keys):
        for round_sum in sums.unbind(1):
            accumulators = accumulators + round_sum
            accumulators = (accumulators ^ _shift_right(accumulators, 47) ^ scramble_key) * PRIME32_1
    if tail_stripes:
        begin = rounds * ROUND_BYTES
        tail = _words(rows[:, begin : begin + tail_stripes * _STRIPE_BYTES])
        accumulators = accumulators + _products(tail.view(len(rows), tail_stripes, _LANES), keys[:tail_stripes]).sum(1)
    last = _words(rows[:, length - _STRIPE_BYTES :])
    return _merge(accumulators + _products(last, words[LAST_KEY : LAST_KEY + _LANES]), length)


@cache
def words_on(device: torch.device) -> torch.Tensor:
    """Return the constants of the lanes on ``device``: int64, see ``SCRAMBLE_KEY``. The first call waits for it."""
    return torch.from_numpy(_WORDS.view(np.int64)).to(device)


def length_term(length: int) -> int:
    """Return what rows of ``length`` bytes add to the merged lanes, as the int64 of the same bits."""
    return _signed(length * _PRIME64_1)


def _round_sums(rows: torch.Tensor, rounds: int, keys: torch.Tensor) -> list[torch.Tensor]:
    """Sum the products of each kilobyte: tensors of shape ``(n, some rounds, lanes)``, in order."""
    step = max(1, _SLICE_BYTES // (ROUND_BYTES * max(1, rows.shape[0])))
    sums = []
    for begin in range(0, rounds, step):
        end = min(rounds, begin + step)
        words = _words(rows[:, begin * ROUND_BYTES : end * ROUND_BYTES])
        sums.append(_products(words.view(len(rows), end - begin, _STRIPES, _LANES), keys).sum(2))
    return sums


def _products(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What each word adds to the lanes: the product of its keyed halves to its own, itself to its neighbour's."""
    keyed = words ^ keys
    swapped = words.view(*words.shape[:-1], _LANES // 2, 2).flip(-1).view(words.shape)
    return (keyed & 0xFFFFFFFF) * _shift_right(keyed, 32) + swapped


def _merge(accumulators: torch.Tensor, length: int) -> torch.Tensor:
    """Fold the eight lanes into one word per row and avalanche it."""
    keyed = accumulators ^ words_on(accumulators.device)[MERGE_KEY : MERGE_KEY + _LANES]
    merged = _multiply_fold(keyed[:, 0::2], keyed[:, 1::2]).sum(1) + length_term(length)
    merged = (merged ^ _shift_right(merged, 37)) * PRIME_AVALANCHE
    return merged ^ _shift_right(merged, 32)


def _multiply_fold(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The unsigned 128-bit product of two words, its halves xored."""
    left_low, left_high = left & 0xFFFFFFFF, _shift_right(left, 32)
    right_low, right_high = right & 0xFFFFFFFF, _shift_right(right, 32)
    low_low, high_low = left_low * right_low, left_high * right_low
    low_high, high_high = left_low * right_high, left_high * right_high
    cross = _shift_right(low_low, 32) + (high_low & 0xFFFFFFFF) + low_high
    upper = _shift_right(high_low, 32) + _shift_right(cross, 32) + high_high
    return upper ^ (left * right)


def _shift_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own carries the sign along."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _words(rows: torch.Tensor) -> torch.Tensor:
    """View rows of bytes as rows of little-endian words, copying only what does not lie at multiples of eight."""
    if rows.stride(1) != 1 or rows.storage_offset() % 8 or rows.stride(0) % 8 or rows.data_ptr() % 8:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.int64)


def _signed(value: int) -> int:
    """The int64 that has the low 64 bits of ``value``."""
    return int(np.uint64(value & 0xFFFFFFFFFFFFFFFF).astype(np.int64))
