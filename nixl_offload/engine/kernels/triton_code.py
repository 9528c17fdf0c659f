"""Device code: blocks and rows copied and summed. XXH3-64 is described in ``checksum_torch``.

A *round* is the kilobyte between two scrambles of the checksum. What it adds to the eight lanes does not depend on
them: ``copy_tiles`` and ``sum_rows`` write these sums to scratch memory, for all rounds of all blocks at once, in
the same pass that copies; ``fold_sums`` then scrambles in order, one block's eight lanes beside another's.

One warp per program: it reads 8 KiB as sixteen loads of 16 bytes a thread, and sums a round without shared memory.
Addresses are int64 throughout: KV caches are larger than 2 GiB. Counts are never specialised on: one compilation
serves any number of blocks.
Threading: no state. ``triton_kernels`` launches it, and is where arguments are checked: nothing is checked here.
"""

# What Triton compiles is not what a type checker sees: arguments are traced, and the decorator is untyped.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from nixl_offload.chunk import checksum_torch

LANES = tl.constexpr(8)
STRIPES = tl.constexpr(checksum_torch.ROUND_BYTES // 64)
ROUND_WORDS = tl.constexpr(checksum_torch.ROUND_BYTES // 8)
SCRAMBLE_KEY = tl.constexpr(checksum_torch.SCRAMBLE_KEY)
LAST_KEY = tl.constexpr(checksum_torch.LAST_KEY)
MERGE_KEY = tl.constexpr(checksum_torch.MERGE_KEY)
START = tl.constexpr(checksum_torch.START)
PRIME32_1 = tl.constexpr(checksum_torch.PRIME32_1)
PRIME_AVALANCHE = tl.constexpr(checksum_torch.PRIME_AVALANCHE)

AHEAD = tl.constexpr(16)
"""Rounds whose sums are read before they are needed: some 20 cycles each, as many as the L2 cache takes together."""
ROWS = tl.constexpr(4)
"""Blocks of one program of ``fold_sums``: a thread for each lane."""


@triton.jit
def _unsigned(words):
    return words.to(tl.uint64, bitcast=True)


@triton.jit
def _products(words, keys):
    """The products of the keyed halves."""
    keyed = words ^ keys
    return (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def _swapped(words, ROUNDS: tl.constexpr, WORDS: tl.constexpr):  # noqa: N803
    """The words of neighbouring lanes exchanged."""
    even, odd = tl.split(words.reshape(ROUNDS, WORDS // 2, 2))
    return tl.join(odd, even).reshape(ROUNDS, WORDS)


@triton.jit
def _at(address, words, ALIGNMENT: tl.constexpr):  # noqa: N803
    """Pointers to consecutive words, from each of some addresses on."""
    pointers = address.to(tl.pointer_type(tl.int64))[:, None] + words[None, :]
    return tl.max_contiguous(tl.multiple_of(pointers, (ALIGNMENT, ALIGNMENT)), (1, words.shape[0]))


@triton.jit
def _round_sums(words, keys, ROUNDS: tl.constexpr):  # noqa: N803
    """What whole rounds add to the lanes: shape (ROUNDS, LANES)."""
    words = words.reshape(ROUNDS, ROUND_WORDS)
    added = _products(words, keys) + _swapped(words, ROUNDS, ROUND_WORDS)
    return tl.sum(added.reshape(ROUNDS, STRIPES, LANES), axis=1)


@triton.jit
def _stripe_keys(constants):
    """The key of each word of a round: a stripe's are eight words of the secret, one word on with every stripe."""
    word = tl.arange(0, ROUND_WORDS)
    return _unsigned(tl.load(constants + word // LANES + word % LANES))


@triton.jit
def _keep(sums, row, rounds, first, found, ROUNDS: tl.constexpr):  # noqa: N803
    """Write what some of the ``rounds`` of a row add, from ``first`` on."""
    number = first + tl.arange(0, ROUNDS)
    place = sums + (row * rounds + number)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tl.store(place, found.to(tl.int64, bitcast=True), mask=(number < rounds)[:, None])


@triton.jit(do_not_specialize=["ids", "table", "rows_at", "row_stride", "sums", "constants", "spans", "tiles"])
def copy_tiles(
    ids,
    table,
    rows_at: tl.int64,
    row_stride: tl.int64,
    sums,
    constants,
    spans,
    tiles,
    FROM: tl.constexpr,  # noqa: N803
    TO: tl.constexpr,  # noqa: N803
    SUM: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr,  # noqa: N803
    TILE_WORDS: tl.constexpr,  # noqa: N803
    ROUNDS: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
):
    """Copy ``TILES`` of the ``tiles`` of one block, a span, and write the sums of their rounds.

    ``FROM``, ``TO``: ``pages``, ``rows``, or ``nothing`` to write to. ``table``: see ``tiles.Tiles``. ``spans``: of a
    block; the grid is blocks × spans. ``ROUNDS``: of a span. ``EVEN``: the last span is as full as the others.
    """
    program = tl.program_id(0)
    row = (program // spans).to(tl.int64)
    span = program % spans
    tile = span * TILES + tl.arange(0, TILES)
    word = tl.arange(0, TILE_WORDS)
    inside = tile < tiles
    if FROM == "pages" or TO == "pages":
        block = tl.load(ids + row)
        if EVEN:
            base = tl.load(table + tile * 2)
            stride = tl.load(table + tile * 2 + 1)
        else:
            base = tl.load(table + tile * 2, mask=inside, other=0)
            stride = tl.load(table + tile * 2 + 1, mask=inside, other=0)
        pages = _at(base + block * stride, word, ALIGNMENT)
    if FROM == "rows" or TO == "rows":
        rows = _at(rows_at + row * row_stride + tile * (TILE_WORDS * 8), word, ALIGNMENT)
    source = pages if FROM == "pages" else rows
    words = tl.load(source) if EVEN else tl.load(source, mask=inside[:, None], other=0)
    if TO != "nothing":
        target = pages if TO == "pages" else rows
        if EVEN:
            tl.store(target, words)
        else:
            tl.store(target, words, mask=inside[:, None])
    if SUM:
        found = _round_sums(_unsigned(words), _stripe_keys(constants)[None, :], ROUNDS)
        _keep(sums, row, tiles * (TILE_WORDS // ROUND_WORDS), span * ROUNDS, found, ROUNDS)


@triton.jit(do_not_specialize=["rows_at", "row_stride", "sums", "constants", "spans", "rounds", "stripes"])
def sum_rows(
    rows_at: tl.int64,
    row_stride: tl.int64,
    sums,
    constants,
    spans,
    rounds,
    stripes,
    ROUNDS: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
):
    """Write the sums of ``ROUNDS`` of the ``rounds`` of one row, of which the first ``stripes`` stripes count.

    The grid is rows × ``spans``. ``EVEN``: all stripes of all spans count.
    """
    program = tl.program_id(0)
    row = (program // spans).to(tl.int64)
    first = (program % spans) * ROUNDS
    word = tl.arange(0, ROUNDS * ROUND_WORDS)
    source = _at(rows_at + row * row_stride + (first + tl.arange(0, 1)) * (ROUND_WORDS * 8), word, ALIGNMENT)
    keys = _stripe_keys(constants)[None, :]
    if EVEN:
        found = _round_sums(_unsigned(tl.load(source)), keys, ROUNDS)
    else:
        counts = (first * ROUND_WORDS + word < stripes * LANES)[None, :]
        words = _unsigned(tl.load(source, mask=counts, other=0))
        keys = tl.where(counts.reshape(ROUNDS, ROUND_WORDS), keys, 0)
        found = _round_sums(words, keys, ROUNDS)
    _keep(sums, row, rounds, first, found, ROUNDS)


@triton.jit
def _scramble(lanes, key):
    return (lanes ^ (lanes >> 47) ^ key) * PRIME32_1


@triton.jit
def _read_ahead(place, left):
    """The sums of ``AHEAD`` rounds from ``place`` on, zeros where fewer are ``left``."""
    found = ()
    for number in tl.static_range(AHEAD):
        found = found + (_unsigned(tl.load(place + number * LANES, mask=number < left, other=0)),)  # noqa: RUF005
    return found


@triton.jit(
    do_not_specialize=["ids", "sums", "found", "last_at", "last_stride", "length_term", "constants", "count", "rounds"]
)
def fold_sums(
    ids,
    sums,
    found,
    last_at: tl.int64,
    last_stride: tl.int64,
    length_term: tl.int64,
    constants,
    count,
    rounds,
    BY_ID: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803
):
    """Write the checksums of ``ROWS`` of the ``count`` blocks whose rounds are summed.

    ``last_at``, ``last_stride``: where the last 64 bytes lie, of block ``ids[n]`` (``BY_ID``) or of row n. ``WHOLE``:
    the sums of the last round hold them already, but with the key of its sixteenth stripe.
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

    block = tl.load(ids + row) if BY_ID else row
    last = _unsigned(tl.load(_at(last_at + block * last_stride, lane, 8)))
    lanes += _products(last, _unsigned(tl.load(constants + LAST_KEY + lane))[None, :])
    if WHOLE:
        lanes -= _products(last, _unsigned(tl.load(constants + STRIPES - 1 + lane))[None, :])
    else:
        lanes += _swapped(last, ROWS, LANES)

    lanes = lanes ^ _unsigned(tl.load(constants + MERGE_KEY + lane))[None, :]
    even, odd = tl.split(lanes.reshape(ROWS, LANES // 2, 2))
    merged = tl.sum(tl.umulhi(even, odd) ^ (even * odd), axis=1) + _unsigned(length_term)
    merged = (merged ^ (merged >> 37)) * PRIME_AVALANCHE
    merged = merged ^ (merged >> 32)
    tl.store(found + row, merged.to(tl.int64, bitcast=True), mask=wanted)
