"""A local model is known by the content of its files: any byte that counts, whatever is read how, errors, the end."""

from __future__ import annotations

import fnmatch
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nixl_offload.errors import NamespaceError
from nixl_offload.identity import weights
from nixl_offload.identity.weights import PIECE_BYTES, WeightsDigest, is_local
from nixl_offload.identity.weights_files import HARMLESS, ModelFile, is_harmless, list_files

PATIENCE_S = 60.0
LONG_BYTES = 1 << 30
"""A file without blocks, of zeros: reading it takes some tenths of a second, and no space."""


def digest_of(model: Path, threads: int = 2) -> str:
    """Return the digest of ``model``, made from nothing."""
    digest = WeightsDigest(str(model), None, threads=threads)
    assert digest.wait(PATIENCE_S)
    return digest.result()


def error_of(model: Path) -> str:
    """Return what is said of a model that cannot be known."""
    with pytest.raises(NamespaceError) as caught:
        digest_of(model)
    return str(caught.value)


def flip(path: Path, at: int) -> None:
    """Flip the lowest bit of one byte."""
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a small checkpoint of two shards."""
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


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(min_size=1, max_size=300), place=st.integers(min_value=0))
def test_every_byte_of_a_small_file_counts(tmp_path: Path, content: bytes, place: int) -> None:
    """Whatever the content, and wherever the byte."""
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    before = digest_of(tmp_path)
    flip(path, place % len(content))
    assert digest_of(tmp_path) != before
    path.write_bytes(content)
    assert digest_of(tmp_path) == before


def test_a_digest_is_what_it_was(tmp_path: Path) -> None:
    """Or an upgrade would find nothing of what was stored before it. Of files of no bytes, some, and over 64 MiB."""
    (tmp_path / "empty.bin").touch()
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate((64 << 20) + 1)
    assert digest_of(tmp_path) == "15d29ab1e1fc932eaba44127f60a00c651a4d9dcffe11ad398a93bd15d5be474"


def test_reads_may_be_short_and_leave_no_file_open(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a network filesystem: the same digest."""
    with (model / "large.bin").open("wb") as file:
        file.truncate(PIECE_BYTES + 1000)
    before, files = digest_of(model), os.listdir("/proc/self/fd")
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:1_000_003]], at))
    assert digest_of(model) == before
    assert len(os.listdir("/proc/self/fd")) == len(files)


def test_names_count(model: Path) -> None:
    """The same bytes under another name, and two files that have changed places, are other models."""
    seen = {digest_of(model)}
    first, second = sorted(model.glob("*.safetensors"))
    first.rename(model / "other.safetensors")
    seen.add(digest_of(model))
    second.rename(first)
    (model / "other.safetensors").rename(second)
    seen.add(digest_of(model))
    assert len(seen) == 3


def test_where_a_model_lies_does_not_count(model: Path, tmp_path: Path) -> None:
    """Renamed, copied, or reached by a link, it is the same model."""
    before = digest_of(model)
    copied = shutil.copytree(model, tmp_path / "copied")
    link = tmp_path / "link"
    link.symlink_to(copied)
    assert digest_of(copied) == digest_of(link) == before
    assert digest_of(model.rename(tmp_path / "renamed")) == before


def test_files_may_be_links(model: Path, tmp_path: Path) -> None:
    """A snapshot of the Hub links to blobs; what it links to counts, not how it is called."""
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        blob = shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "blobs", Path(blob).name))
    assert digest_of(snapshot) == digest_of(model)
    flip(blobs / "1", 100)
    assert digest_of(snapshot) != digest_of(model)


def test_directories_may_be_links_and_circles(model: Path, tmp_path: Path) -> None:
    """What lies in a linked directory counts; a link to a directory above ends nothing."""
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "model.safetensors").write_bytes(b"1")
    before = digest_of(model)
    (model / "circle").symlink_to(model)
    assert digest_of(model) == before
    (model / "encoder").symlink_to(tmp_path / "encoder")
    linked = digest_of(model)
    assert linked != before
    (tmp_path / "encoder" / "model.safetensors").write_bytes(b"2")
    assert digest_of(model) not in (before, linked)


def test_the_order_of_directory_entries_does_not_count() -> None:
    """Memory filesystems list what was made last first."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        names = ["a.bin", "b.bin", "c.bin", "d.bin"]
        found = []
        for number, order in enumerate((names, names[::-1])):
            directory = Path(folder, str(number))
            directory.mkdir()
            for name in order:
                (directory / name).write_text(name)
            found.append((os.listdir(directory), digest_of(directory)))
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


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


@pytest.mark.parametrize("pattern", HARMLESS)
def test_what_the_table_excuses_does_not_count(model: Path, pattern: str) -> None:
    """Neither that it is there, nor what is in it, nor that it cannot be read."""
    before = digest_of(model)
    path = model / pattern.replace("[0-9]", "7").replace("*", "x")
    path.parent.mkdir(exist_ok=True)
    path.write_text("1")
    assert digest_of(model) == before
    path.unlink()
    path.symlink_to("nowhere")
    assert digest_of(model) == before


@pytest.mark.parametrize("name", COUNTING.split())
def test_everything_else_counts(model: Path, name: str) -> None:
    """That it is there, and each byte of it."""
    seen = {digest_of(model)}
    path = model / name
    path.parent.mkdir(exist_ok=True)
    for content in ("", "1", "2"):
        path.write_text(content)
        seen.add(digest_of(model))
    assert len(seen) == 4


def test_what_models_come_with_besides_weights_does_not_count() -> None:
    """Names from the Hub and from training runs; each excuse is for one of them."""
    names = BESIDES.split()
    assert all(is_harmless(name) for name in names)
    assert all(any(fnmatch.fnmatchcase(name, pattern) for name in names) for pattern in HARMLESS)


def test_what_is_neither_file_nor_directory_does_not_count(model: Path) -> None:
    """VLLM serves such a directory, and so do we; but weights that are not there are told."""
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
    for name in (
        "llama-Q8-00001-of-00002.gguf",
        "llama-Q4-00002-of-00003.gguf",
        "llama-Q4.gguf",
        "README.md",
        "mmproj.txt",
    ):
        (tmp_path / name).write_bytes(b"1")
    assert digest_of(path) in seen
    assert [file.name for file in list_files(str(path))] == [path.name, beside.name, "mmproj-f16.gguf"], "each once"
    alone = tmp_path / "llama-Q4.gguf"
    before = digest_of(alone)
    flip(alone, 0)
    assert digest_of(alone) != before


def test_a_directory_without_weights_is_told(model: Path) -> None:
    """Its digest covers what is there, and the caller learns that no weights are among it."""
    digest = WeightsDigest(str(model), None)
    assert digest.wait(PATIENCE_S)
    assert digest.weight_files == 2
    for path in model.glob("*.safetensors"):
        path.unlink()
    bare = WeightsDigest(str(model), None)
    assert bare.wait(PATIENCE_S)
    assert bare.weight_files == 0
    assert bare.result() != digest.result()


def test_which_files_hold_weights(tmp_path: Path) -> None:
    """By the endings that vLLM's loaders look for."""
    with_weights = ["a.bin", "a.ckpt", "a.gguf", "a.npy", "a.pt", "a.pth", "a.safetensors", "a.tensors"]
    for name in (*with_weights, "config.json", "tokenizer.model", "model.safetensors.index.json"):
        (tmp_path / name).touch()
    assert [file.name for file in list_files(str(tmp_path)) if file.holds_weights] == with_weights


def test_what_is_local(model: Path) -> None:
    """As for vLLM: a directory or a file that is there; anything else is a name on a hub."""
    assert is_local(str(model))
    assert is_local(str(model / "config.json"))
    assert not is_local(str(model / "nothing"))
    assert not is_local("meta-llama/Llama-3.1-8B")


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
    """There is no digest of what could not be read."""
    path = model / "model-00003-of-00003.safetensors"
    make(path)
    assert error_of(model) == f"cannot tell which model this is: {path}{why}"


def test_a_path_with_more_files_than_a_model_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home directory, say, is not read whole."""
    monkeypatch.setattr("nixl_offload.identity.weights_files._FILES_MAX", 2)
    for number in range(3):
        (tmp_path / str(number)).touch()
    assert error_of(tmp_path) == f"cannot tell which model {tmp_path} is: it has more than 2 files"


def test_a_link_that_leads_elsewhere_for_a_while_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after it is what it was; what was read in between is not."""
    link = model / "linked.bin"

    def list_and_divert(path: str) -> tuple[ModelFile, ...]:
        for target in "ab":
            link.unlink(missing_ok=True)
            link.symlink_to(tmp_path / target)
            if target == "a":
                files = list_files(path)
        return files

    monkeypatch.setattr(weights, "list_files", list_and_divert)
    (tmp_path / "b").write_bytes(b"0")
    (tmp_path / "a").write_bytes(b"1")
    assert error_of(model).endswith("linked.bin changed while it was read")


class HeldReads:
    """Every read waits for ``go_on``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self._read = threading.Event(), threading.Event(), os.preadv
        monkeypatch.setattr(os, "preadv", self._wait_and_read)

    def _wait_and_read(self, fd: int, buffers: list[memoryview], at: int) -> int:
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        return self._read(fd, buffers, at)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldReads:
    return HeldReads(monkeypatch)


def append(model: Path) -> None:
    with (model / "long.bin").open("ab") as file:
        file.write(b"1")


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (append, "long.bin"),
        (lambda model: flip(model / "long.bin", 0), "long.bin"),
        (lambda model: os.truncate(model / "long.bin", 1), "long.bin"),
        (lambda model: (model / "long.bin").unlink(), "long.bin"),
        (lambda model: os.replace(model / "config.json", model / "long.bin"), "long.bin"),
        (lambda model: (model / "new.bin").touch(), "new.bin"),
        (shutil.rmtree, "(long.bin|model)"),
    ],
    ids=["grows", "is written", "shrinks", "vanishes", "is replaced", "comes", "all vanish"],
)
def test_a_model_that_changes_while_it_is_read_has_no_digest(
    model: Path, held: HeldReads, change: Callable[[Path], None], file: str
) -> None:
    """Neither before nor after is what was read."""
    (model / "long.bin").write_bytes(bytes(10_000))
    time.sleep(0.05)  # the kernel's clock for files ticks every 10 ms or so
    digest = WeightsDigest(str(model), None, threads=1)
    assert held.begun.wait(PATIENCE_S)
    change(model)
    held.go_on.set()
    assert digest.wait(PATIENCE_S)
    with pytest.raises(NamespaceError, match=f"{file}: No such file|{file} changed while it was read"):
        digest.result()


@pytest.mark.parametrize("is_closed", [True, False])
def test_who_stops_waits_for_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    """Not for the rest of a file, which may lie on a slow disk: after ``close``, and where another file failed."""
    (tmp_path / "bad.bin").touch()
    os.truncate(tmp_path / "bad.bin", 1)
    with (tmp_path / "long.bin").open("wb") as long:
        long.truncate(LONG_BYTES)
    begun, seen, ended, read = threading.Event(), threading.Event(), threading.Event(), os.preadv

    def read_while_it_ends(fd: int, buffers: list[memoryview], at: int) -> int:
        if len(buffers[0]) == 1:
            assert begun.wait(PATIENCE_S)
            assert seen.wait(PATIENCE_S)
            if not is_closed:
                raise OSError(5, "Input/output error")
        else:
            begun.set()
            assert ended.wait(PATIENCE_S)
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", read_while_it_ends)
    digest = WeightsDigest(str(tmp_path), None, threads=2)
    assert begun.wait(PATIENCE_S)
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("weights-")]
    assert "weights-digest" in {thread.name for thread in ours}
    assert all(thread.daemon for thread in ours), "a process may end meanwhile"
    if is_closed:
        digest.close()
    seen.set()
    assert digest.wait(PATIENCE_S)
    ended.set()
    while any(thread.name.startswith("weights-read-") for thread in threading.enumerate()):
        time.sleep(0.001)
    assert 0 < digest.progress()[0] <= 2 * weights._BUFFER_BYTES + 1, "one read of each thread, and the byte"


def test_before_the_end_there_is_no_result(model: Path, held: HeldReads) -> None:
    """Nobody waits who did not ask to."""
    digest = WeightsDigest(str(model), None, threads=1)
    with pytest.raises(NamespaceError, match="have not been read yet"):
        digest.result()
    assert not digest.wait(0.0)
    digest.close()
    held.go_on.set()
    assert digest.wait(PATIENCE_S)
    with pytest.raises(NamespaceError, match="stopped"):
        digest.result()


def test_what_takes_long_is_told(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line now and then while files are read, and one at the end. What is quick is not told."""
    caplog.set_level(logging.INFO, logger=weights.__name__)
    monkeypatch.setattr(weights, "_SLOW_S", PATIENCE_S)
    digest_of(model)
    assert not caplog.messages
    monkeypatch.setattr(weights, "_PROGRESS_S", 0.02)
    monkeypatch.setattr(weights, "_SLOW_S", 0.0)
    with (model / "long.bin").open("wb") as long:
        long.truncate(LONG_BYTES)
    digest_of(model, threads=1)
    *during, end = caplog.messages
    assert during
    assert all(line.startswith(f"Reading the files of {model}, to know which weights they are: ") for line in during)
    assert end.startswith(f"Read the files of {model}, to know which weights they are: 1.0 of 1.0 GiB in ")
    assert all(int(line.rpartition(" s, ")[0].rpartition(" ")[2]) < PATIENCE_S for line in caplog.messages)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert error_of(tmp_path / "nothing") == (
        f"cannot tell which model this is: {tmp_path / 'nothing'}: No such file or directory"
    )


def test_a_file_that_has_become_a_pipe_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a pipe waits for whoever writes to it."""

    def list_and_replace(path: str) -> tuple[ModelFile, ...]:
        files = list_files(path)
        (model / "config.json").unlink()
        os.mkfifo(model / "config.json")
        return files

    monkeypatch.setattr(weights, "list_files", list_and_replace)
    assert error_of(model).endswith("config.json is not a regular file")


def test_harmless_directories_are_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One may be somebody else's and unreadable, or a link to a large tree."""
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "checkpoint-500").mkdir()
    entered: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: entered.append(str(path)) or scandir(path))
    assert [file.name for file in list_files(str(tmp_path))] == ["config.json"]
    assert entered == [str(tmp_path)]


@pytest.mark.parametrize(
    ("cores", "asked", "threads"), [(1, None, 1), (2, None, 1), (6, None, 3), (64, None, 4), (2, 3, 3)]
)
def test_half_of_the_cores_read_and_four_at_most(
    model: Path, monkeypatch: pytest.MonkeyPatch, cores: int, asked: int | None, threads: int
) -> None:
    """What starts beside a model's loader leaves cores to it."""
    with (model / "long.bin").open("wb") as long:
        long.truncate(2 * threads * PIECE_BYTES)
    seen, together, read = set[str](), threading.Event(), os.preadv

    def read_together(fd: int, buffers: list[memoryview], at: int) -> int:
        seen.add(threading.current_thread().name)
        if len(seen) >= threads or not together.wait(PATIENCE_S):
            together.set()
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", read_together)
    monkeypatch.setattr(os, "sched_getaffinity", {0: set(range(cores))}.__getitem__)  # of this process
    digest = WeightsDigest(str(model), None, threads=asked)
    assert digest.wait(PATIENCE_S)
    assert seen == {f"weights-read-{number}" for number in range(threads)}
