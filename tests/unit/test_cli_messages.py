"""Wrong arguments and configs are one line and exit code 2, missing things exit code 1; there is no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_offload import __version__
from nixl_offload.cli.main import main

SLAB = "{kind: slab, path: DIR/kv, capacity: 1GiB}"
MEMORY = "{kind: memory, capacity: 1GiB}"
SHARED = "{kind: shared_dir, path: DIR/kv, capacity: 1GiB}"
S3 = "{kind: s3, bucket: kv-cache, endpoint: 'http://127.0.0.1:9'}"
LONG = f"{{kind: shared_dir, path: /{'x' * 300}/kv, capacity: 1GiB}}"


@pytest.mark.parametrize(
    ("command", "tiers", "code", "words"),
    [
        ("show", "none", 2, "kv.yaml: cannot be read: No such file or directory\n"),
        ("ls --namespace x", SLAB, 2, "--namespace: 'x' is not one"),
        ("ls --tier s3", SLAB, 2, "--tier: 's3' is not among the tiers"),
        ("ls", SHARED.replace("DIR/kv", "DIR/typo"), 1, "there is no such directory; is the filesystem mounted?"),
        ("ls", LONG, 1, "/kv: cannot be looked at: File name too long"),
        ("ls", LONG.replace("shared_dir", "slab"), 1, "/kv: cannot be looked at: File name too long"),
        ("verify --namespace xyz", SLAB, 2, "--namespace: 'xyz' is not one"),
        ("verify", MEMORY, 2, "only memory, which cannot be looked at from outside the server"),
        ("verify --rate 5MB", SLAB, 2, "'5MB'"),
        ("verify --rate 0/s", SLAB, 2, "'0/s'"),
        ("check --path DIR/kv", SLAB, 2, "say a config file, or --path DIR, not both"),
        ("gc", SHARED.replace("DIR/kv", "DIR/typo"), 1, "there is no such directory; is the filesystem mounted?"),
        ("gc --namespace ../x", SHARED, 2, "'../x' is not one; allowed: 32 hex digits"),
        ("gc --max-size 20TB!", SHARED, 2, "'20TB!' is not a size; allowed: "),
        ("gc --older-than 7", SHARED, 2, "'7' is not a duration; allowed: "),
        ("gc --tier s3", SHARED, 2, "--tier: 's3' is not among the tiers of FILE; allowed: shared_dir\n"),
        ("gc --tier memory", SHARED, 2, "choose from"),
        ("gc --delete", S3, 2, "--delete: down to what? Say --max-size or --older-than, or capacity or ttl in"),
        ("gc --delete", f"{SLAB}, {S3}", 2, "--delete: down to what?"),
        ("gc --delete", SLAB, 2, "gc looks after a bucket or a shared directory; a slab keeps to its capacity by"),
        ("gc --delete", f"{SHARED}, {S3}", 2, "are both shared, and gc looks after one at a time; say --tier"),
    ],
)
def test_what_is_wrong_is_one_line(
    command: str, tiers: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kv").mkdir()
    file = tmp_path / "kv.yaml"
    if tiers != "none":
        file.write_text(f"tiers: [{tiers.replace('DIR', str(tmp_path))}]\n")
    name, *options = command.replace("DIR", str(tmp_path)).split()
    try:
        found = main([name, str(file), *options])
    except SystemExit as ended:
        found = int(str(ended.code))
    assert found == code
    assert words.replace("FILE", str(file)) in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("arguments", [[], ["shwo"], ["show"], ["show", "--json", "--kv-transfer-config", "x"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: nixl-offload" in capsys.readouterr().err


def test_check_wants_a_config_or_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 2
    assert capsys.readouterr().err == "nixl-offload: check: say a config file, or --path DIR\n"
    assert main(["check", "--path", "/k\0v"]) == 2
    assert "--path: tiers[0].path: '/k\\x00v' is refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--version", f"nixl-offload {__version__}\n"),
        ("--help", "nixl-offload show kv.yaml"),
        ("gc --help", "nixl-offload gc kv.yaml --delete"),
        ("bucket init --help", "nixl-offload bucket init kv.yaml --yes"),
    ],
)
def test_help(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 0
    assert words in capsys.readouterr().out
