"""Device code: copies of blocks, and XXH3-64 of rows.

For rows above 240 bytes XXH3 works in *rounds* of a kilobyte: it adds sixteen products to each of eight lanes, then
scrambles the lanes. The additions of a round do not depend on the lanes. So ``sum_rounds`` computes the additions of
all rounds of all rows at once, in scratch memory. ``fold_rounds`` then adds and scrambles in order, many rows side by
side.

One warp per program: it reads 8 KiB as sixteen loads of 16 bytes a thread, and sums a round without shared memory.
Addresses are int64 throughout: KV caches are larger than 2 GiB. Counts are never specialised on: one compilation
serves any number of blocks.
Threading: no state. ``triton_kernels`` launches the kernels and checks all arguments.
"""

# Type checkers do not understand Triton: arguments are traced, and the decorator is untyped.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

LANES = tl.constexpr(8)
STRIPES = tl.constexpr(16)
"""Stripes of a round: one word per lane each. The key of stripe s is eight words of the secret, from word s on."""
ROUND_WORDS = tl.constexpr(128)
SCRAMBLE_KEY, LAST_KEY, MERGE_KEY, START = (tl.constexpr(at) for at in (16, 24, 32, 40))
"""Where the table of constants has the keys of a scramble, of the last stripe and of the merge, and the lanes' first
values. The table begins with the secret.
"""
PRIME32_1 = tl.constexpr(0x9E3779B1)
PRIME_AVALANCHE = tl.constexpr(0x165667919E3779F9)

AHEAD = tl.constexpr(16)
"""Rounds whose sums are read ahead: about 20 cycles each, together as long as a read from the L2 cache."""
ROWS = tl.constexpr(4)
"""Rows of one program of ``fold_rounds``: one thread per lane."""


@triton.jit
def _unsigned(words):
    return words.to(tl.uint64, bitcast=True)


@triton.jit
def _added(words, keys, ROWS: tl.constexpr, WORDS: tl.constexpr):  # noqa: N803
    """Return what words add to the lanes: each the product of its keyed halves, and itself to its neighbour's lane."""
    keyed = words ^ keys
    even, odd = tl.split(words.reshape(ROWS, WORDS // 2, 2))
    return (keyed & 0xFFFFFFFF) * (keyed >> 32) + tl.join(odd, even).reshape(ROWS, WORDS)


@triton.jit
def _at(address, words):
    """Return pointers to consecutive words from each address on. Addresses are multiples of 16."""
    pointers = address.to(tl.pointer_type(tl.int64))[:, None] + words[None, :]
    return tl.max_contiguous(tl.multiple_of(pointers, (16, 16)), (1, words.shape[0]))


@triton.jit(do_not_specialize=["ids", "table", "rows_at", "row_stride", "spans", "tiles"])
def copy_tiles(
    ids,
    table,
    rows_at: tl.int64,
    row_stride: tl.int64,
    spans,
    tiles,
    GATHER: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr,  # noqa: N803
    TILE_WORDS: tl.constexpr,  # noqa: N803
):
    """Copy a span, ``TILES`` of a block's ``tiles``, from pages to rows (``GATHER``) or back.

    ``table``: see ``triton_kernels.Tiles``. ``spans``: number per block; the grid is blocks × spans.
    """
    program = tl.program_id(0)
    row = (program // spans).to(tl.int64)
    tile = (program % spans) * TILES + tl.arange(0, TILES)
    word = tl.arange(0, TILE_WORDS)
    inside = tile < tiles
    base = tl.load(table + tile * 2, mask=inside, other=0)
    stride = tl.load(table + tile * 2 + 1, mask=inside, other=0)
    pages = _at(base + tl.load(ids + row) * stride, word)
    rows = _at(rows_at + row * row_stride + tile * (TILE_WORDS * 8), word)
    words = tl.load(pages if GATHER else rows, mask=inside[:, None], other=0)
    tl.store(rows if GATHER else pages, words, mask=inside[:, None])


@triton.jit(do_not_specialize=["rows_at", "row_stride", "sums", "constants", "spans", "rounds", "stripes"])
def sum_rounds(
    rows_at: tl.int64,
    row_stride: tl.int64,
    sums,
    constants,
    spans,
    rounds,
    stripes,
    ROUNDS: tl.constexpr,  # noqa: N803
):
    """Write what ``ROUNDS`` of a row's ``rounds`` add to the lanes. Only the row's first ``stripes`` stripes count. The
    grid is rows × ``spans``.
    """
    program = tl.program_id(0)
    row = (program // spans).to(tl.int64)
    first = (program % spans) * ROUNDS
    word = tl.arange(0, ROUNDS * ROUND_WORDS)
    source = _at(rows_at + row * row_stride + (first + tl.arange(0, 1)) * (ROUND_WORDS * 8), word)
    counts = (first * ROUND_WORDS + word < stripes * LANES)[None, :]
    words = _unsigned(tl.load(source, mask=counts, other=0)).reshape(ROUNDS, ROUND_WORDS)
    place = tl.arange(0, ROUND_WORDS)
    keys = _unsigned(tl.load(constants + place // LANES + place % LANES))[None, :]
    keys = tl.where(counts.reshape(ROUNDS, ROUND_WORDS), keys, 0)
    added = _added(words, keys, ROUNDS, ROUND_WORDS)
    found = tl.sum(added.reshape(ROUNDS, STRIPES, LANES), axis=1)
    number = first + tl.arange(0, ROUNDS)
    target = sums + (row * rounds + number)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tl.store(target, found.to(tl.int64, bitcast=True), mask=(number < rounds)[:, None])


@triton.jit
def _scramble(lanes, key):
    return (lanes ^ (lanes >> 47) ^ key) * PRIME32_1


@triton.jit
def _read_ahead(place, left):
    """Return the sums of ``AHEAD`` rounds from ``place`` on; zeros beyond the ``left`` ones."""
    found = ()
    for number in tl.static_range(AHEAD):
        found = found + (_unsigned(tl.load(place + number * LANES, mask=number < left, other=0)),)  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["sums", "found", "last_at", "row_stride", "length_term", "constants", "count", "rounds"])
def fold_rounds(sums, found, last_at: tl.int64, row_stride: tl.int64, length_term: tl.int64, constants, count, rounds):
    """Write the checksums of ``ROWS`` of the ``count`` rows, from the sums of their rounds. ``last_at``: address of row
    0's last 64 bytes, which have their own key.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wanted = row < count
    row = tl.minimum(row, count - 1).to(tl.int64)
    lane = tl.arange(0, LANES)
    place = sums + (row * rounds)[:, None] * LANES + lane[None, :]
    left = tl.broadcast_to(tl.where(wanted, rounds, 0)[:, None], (ROWS, LANES))
    key = _unsigned(tl.load(constants + SCRAMBLE_KEY + lane))[None, :]
    lanes = tl.broadcast_to(_unsigned(tl.load(constants + START + lane))[None, :], (ROWS, LANES))

    ahead = _read_ahead(place, left)
    for _ in range(0, rounds - AHEAD, AHEAD):
        now = ahead
        place += AHEAD * LANES
        left -= AHEAD
        ahead = _read_ahead(place, left)
        for number in tl.static_range(AHEAD):
            lanes = _scramble(lanes + now[number], key)
    for number in tl.static_range(AHEAD):
        lanes += ahead[number]
        lanes = tl.where(number < left - 1, _scramble(lanes, key), lanes)

    address = (last_at + row * row_stride).to(tl.pointer_type(tl.int64))
    last = _unsigned(tl.load(address[:, None] + lane[None, :]))
    lanes += _added(last, _unsigned(tl.load(constants + LAST_KEY + lane))[None, :], ROWS, LANES)

    lanes = lanes ^ _unsigned(tl.load(constants + MERGE_KEY + lane))[None, :]
    even, odd = tl.split(lanes.reshape(ROWS, LANES // 2, 2))
    merged = tl.sum(tl.umulhi(even, odd) ^ (even * odd), axis=1) + _unsigned(length_term)
    merged = (merged ^ (merged >> 37)) * PRIME_AVALANCHE
    merged = merged ^ (merged >> 32)
    tl.store(found + row, merged.to(tl.int64, bitcast=True), mask=wanted)
