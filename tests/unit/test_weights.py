"""A local model is known by the content of its files. Every byte counts; without all of them there is no digest."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_offload.errors import NamespaceError
from nixl_offload.identity import weights
from nixl_offload.identity.weights import HARMLESS, PIECE_BYTES, digest_files, list_files

PATIENCE_S = 60.0


def digest_of(model: Path) -> str:
    return digest_files(str(model), threads=2).digest


def error_of(model: Path) -> str:
    with pytest.raises(NamespaceError) as caught:
        digest_of(model)
    return str(caught.value)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for shard in range(2):
        (directory / f"model-0000{shard + 1}-of-00002.safetensors").write_bytes(os.urandom(3000))
    (directory / "config.json").write_text('{"hidden_size": 64}')
    return directory


def test_every_byte_of_a_large_file_counts(model: Path) -> None:
    """The first, the last, and those at both sides of the borders of pieces and of what is read at a time."""
    path = model / "large.bin"
    size_bytes = PIECE_BYTES + 1000
    with path.open("wb") as file:
        file.truncate(size_bytes)
    borders = (0, 1 << 20, weights._BUFFER_BYTES, PIECE_BYTES)
    places = sorted({place for border in borders for place in (border - 1, border, border + 1)} | {size_bytes - 1})
    seen = {digest_of(model)}
    for place in places[1:]:
        flip(path, place)
        seen.add(digest_of(model))
        flip(path, place)
    with path.open("ab") as file:
        file.write(b"\0")
    seen.add(digest_of(model))
    assert places[0] == -1
    assert len(seen) == len(places) + 1


def test_a_digest_is_what_it_was(tmp_path: Path) -> None:
    """Otherwise an upgrade would find no chunk stored before it. For empty, small and over 64 MiB large files."""
    (tmp_path / "empty.bin").touch()
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate((64 << 20) + 1)
    assert digest_of(tmp_path) == "15d29ab1e1fc932eaba44127f60a00c651a4d9dcffe11ad398a93bd15d5be474"


def test_reads_may_be_short_and_leave_no_file_open(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a network filesystem, and directory entries may come in any order: the same digest."""
    with (model / "large.bin").open("wb") as file:
        file.truncate(PIECE_BYTES + 1000)
    before, files = digest_of(model), os.listdir("/proc/self/fd")
    read, scandir = os.preadv, os.scandir
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:1_000_003]], at))
    monkeypatch.setattr(os, "scandir", lambda path: contextlib.nullcontext(list(scandir(path))[::-1]))
    assert digest_of(model) == before
    assert len(os.listdir("/proc/self/fd")) == len(files)


def test_names_count_and_where_the_model_lies_does_not(model: Path, tmp_path: Path) -> None:
    """The same bytes under another name, or two files that changed places, are other models. A copy or link is not."""
    before = digest_of(model)
    copied = shutil.copytree(model, tmp_path / "copied")
    link = tmp_path / "link"
    link.symlink_to(copied)
    assert digest_of(copied) == digest_of(link) == digest_of(model.rename(tmp_path / "renamed")) == before
    seen = {before}
    first, second = sorted(copied.glob("*.safetensors"))
    first.rename(copied / "other.safetensors")
    seen.add(digest_of(copied))
    second.rename(first)
    (copied / "other.safetensors").rename(second)
    seen.add(digest_of(copied))
    assert len(seen) == 3


def test_links_are_followed(model: Path, tmp_path: Path) -> None:
    """Content counts, not the name of a link's target. A link to a directory above adds nothing."""
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        blob = shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "blobs", Path(blob).name))
    (snapshot / "circle").symlink_to(snapshot)
    seen = {digest_of(model)}
    assert digest_of(snapshot) in seen
    flip(blobs / "1", 100)
    seen.add(digest_of(snapshot))
    (tmp_path / "encoder").mkdir()
    (snapshot / "encoder").symlink_to(tmp_path / "encoder")
    for content in (b"1", b"2"):
        (tmp_path / "encoder" / "model.safetensors").write_bytes(content)
        seen.add(digest_of(snapshot))
    assert len(seen) == 4


BESIDES = """
    .gitattributes .cache/huggingface/x.lock lost+found assets/.DS_Store __pycache__/modeling_own.pyc README.md
    docs/USAGE.md LICENSE LICENSE.txt NOTICE NOTICE.txt USE_POLICY USE_POLICY.txt a.gif a.jpeg a.jpg a.mp4 a.pdf
    a.png a.svg figures/a.webp chat_template.jinja chat_template.json checkpoint-500/model.safetensors
    optimizer.bin optimizer.pt scaler.pt scheduler.pt trainer_state.json training_args.bin coreml/a.mlmodel
    flax_model.msgpack flax_model-00001-of-00002.msgpack metal/model.bin onnx/model.onnx openvino/model.xml
    original/consolidated.00.pth rust_model.ot tf_model.h5 tf_model-00001-of-00002.h5
"""
COUNTING = """
    adapter_config.json adapter_model.safetensors added_tokens.json audio_tokenizer/config.json config.json
    consolidated.safetensors generation_config.json hf_quant_config.json kernels/rope.py
    model.safetensors.index.json model-rank-0-part-0.safetensors modeling_own.py np/lm_head.weight params.json
    preprocessor_config.json quantize_config.json something_new transformer/model.safetensors torch.pt/model.bin
    tekken.json tokenizer.json whisper-large-v3/model.safetensors
"""


def test_what_the_table_excuses_does_not_count(model: Path) -> None:
    """Files from the Hub and from training runs; each exception is for one of them. They may be unreadable."""
    before, names = digest_of(model), BESIDES.split()
    for name in names:
        path = model / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("nowhere")
    assert digest_of(model) == before
    assert all(any(fnmatch.fnmatchcase(name, pattern) for name in names) for pattern in HARMLESS)


def test_everything_else_counts(model: Path) -> None:
    """Its presence, and each byte of it."""
    seen = {digest_of(model)}
    for name in COUNTING.split():
        path = model / name
        path.parent.mkdir(exist_ok=True)
        for content in ("", "1", "2"):
            path.write_text(content)
            seen.add(digest_of(model))
    assert len(seen) == 1 + 3 * len(COUNTING.split())


def test_what_is_neither_file_nor_directory_does_not_count(model: Path) -> None:
    """VLLM serves such a directory, and so do we; but missing weights are reported."""
    before = digest_of(model)
    os.mkfifo(model / "fifo")
    (model / "link").symlink_to("nowhere")
    (model / "lost+found").mkdir()
    assert digest_of(model) == before


def test_a_model_in_one_file_is_that_file_and_what_its_loader_finds_beside_it(tmp_path: Path) -> None:
    """GGUF: the other parts of the same model and the projector of images, but no other quantization."""
    path = tmp_path / "llama-Q4-00001-of-00002.gguf"
    beside = tmp_path / "llama-Q4-00002-of-00002.gguf"
    for file in (path, beside):
        file.write_bytes(b"0")
    seen = {digest_of(path)}
    for file in (path, beside, tmp_path / "mmproj-f16.gguf"):
        file.write_bytes(b"1")
        seen.add(digest_of(path))
    assert len(seen) == 4
    others = [f"llama-{of}.gguf" for of in ("Q8-00001-of-00002", "Q4-00002-of-00003", "Q4")]
    for name in (*others, "README.md", "mmproj.txt"):
        (tmp_path / name).write_bytes(b"1")
    assert digest_of(path) in seen
    assert [file.name for file in list_files(str(path))] == [path.name, beside.name, "mmproj-f16.gguf"], "each once"
    alone = tmp_path / "llama-Q4.gguf"
    before = digest_of(alone)
    flip(alone, 0)
    assert digest_of(alone) != before


def test_a_directory_without_weights_is_told(tmp_path: Path) -> None:
    """Files with weights are known by the extensions that vLLM's loaders look for."""
    with_weights = ["a.bin", "a.ckpt", "a.gguf", "a.npy", "a.pt", "a.pth", "a.safetensors", "a.tensors"]
    for name in (*with_weights, "config.json", "tokenizer.model", "model.safetensors.index.json"):
        (tmp_path / name).touch()
    assert [file.name for file in list_files(str(tmp_path)) if file.holds_weights] == with_weights
    for expected in (len(with_weights), 0):
        assert digest_files(str(tmp_path)).weight_files == expected
        for name in with_weights:
            (tmp_path / name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.symlink_to("nowhere"), ": No such file or directory"),
        (lambda path: path.symlink_to(path.name), ": Too many levels of symbolic links"),
        (os.mkfifo, " is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), " is not a regular file"),
        (lambda path: path.symlink_to("/proc/self/mem"), ": Input/output error"),
        (lambda path: path.symlink_to("/proc/self/status"), " changed while it was read"),
        (lambda path: path.symlink_to("/sys/devices/system/cpu/online"), " changed while it was read"),
    ],
    ids=["dangling", "circle", "fifo", "device", "unreadable", "longer than its size", "shorter than its size"],
)
def test_a_file_that_cannot_be_read_whole_is_named(model: Path, make: Callable[[Path], None], why: str) -> None:
    """A model with an unreadable file has no digest."""
    path = model / "model-00003-of-00003.safetensors"
    make(path)
    assert error_of(model) == f"cannot tell which model this is: {path}{why}"


def test_a_path_with_more_files_than_a_model_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home directory, say, is not read whole."""
    monkeypatch.setattr("nixl_offload.identity.weights._FILES_MAX", 2)
    for number in range(3):
        (tmp_path / str(number)).touch()
    assert error_of(tmp_path) == f"cannot tell which model {tmp_path} is: it has more than 2 files"


class HeldReading:
    """A digest whose every read waits for ``end``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
        self.stop, self._begun, self._go_on = (threading.Event() for _ in range(3))
        self._read = os.preadv
        self._error: NamespaceError | None = None
        monkeypatch.setattr(os, "preadv", self._wait_and_read)
        self._thread = threading.Thread(target=self._digest, args=(str(model),))
        self._thread.start()
        assert self._begun.wait(PATIENCE_S)

    def _digest(self, model: str) -> None:
        try:
            digest_files(model, threads=1, stop=self.stop)
        except NamespaceError as error:
            self._error = error

    def _wait_and_read(self, fd: int, buffers: list[memoryview], at: int) -> int:
        self._begun.set()
        assert self._go_on.wait(PATIENCE_S)
        return self._read(fd, buffers, at)

    def end(self) -> str:
        """Let the reading go on, and return its error as text."""
        self._go_on.set()
        self._thread.join(PATIENCE_S)
        return str(self._error)


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (lambda model: os.truncate(model / "long.bin", 10_001), "long.bin"),
        (lambda model: flip(model / "long.bin", 0), "long.bin"),
        (lambda model: os.truncate(model / "long.bin", 1), "long.bin"),
        (lambda model: (model / "long.bin").unlink(), "long.bin"),
        (lambda model: os.replace(model / "config.json", model / "long.bin"), "long.bin"),
        (lambda model: ((model / "long.bin").unlink(), os.mkfifo(model / "long.bin")), "long.bin"),
        (lambda model: (model / "new.bin").touch(), "new.bin"),
        (shutil.rmtree, "(long.bin|model)"),
    ],
    ids=["grows", "is written", "shrinks", "vanishes", "is replaced", "is a pipe", "comes", "all vanish"],
)
def test_a_model_that_changes_while_it_is_read_has_no_digest(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], file: str
) -> None:
    """The bytes read are neither the old model nor the new one."""
    (model / "long.bin").write_bytes(bytes(10_000))
    time.sleep(0.05)  # the kernel's clock for files ticks every 10 ms or so
    reading = HeldReading(monkeypatch, model)
    change(model)
    said = f"{file}: No such file|{file} (changed while it was read|is not a regular file)"
    assert re.search(said, reading.end())


def test_reading_can_be_given_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = HeldReading(monkeypatch, model)
    reading.stop.set()
    assert "stopped" in reading.end()
