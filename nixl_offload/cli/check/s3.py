"""What ``nixl-offload check`` says of an S3 tier, from the network to what its credentials may do, and how fast it is.

Threading: one thread, blocking calls with time limits; movers run in the child.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any, Final

from nixl_offload.cli.check.child import Answer, Trials
from nixl_offload.cli.check.file import speed_line
from nixl_offload.cli.check.lines import Line, Section, ok, unknown, warning, wrong
from nixl_offload.cli.check.reach import Reached, reach
from nixl_offload.cli.check.report import Doing
from nixl_offload.cli.check.rights import (
    credentials_line,
    is_about_region,
    lifecycle_lines,
    no_credentials_line,
    region_line,
    try_rights,
)
from nixl_offload.config import S3Config
from nixl_offload.errors import NotSupportedError, StoreError
from nixl_offload.stores.s3 import S3Address
from nixl_offload.stores.select import open_store

PATIENCE_S: Final = 5.0
"""One request of ours; a server that takes longer is told as one that does not answer."""
_GLOBAL: Final = (None, "aws-global", "us-east-1")
"""Where S3 is asked when nobody says a region."""


def s3_section(
    tier: S3Config, trials: Trials, doing: Doing, *, config_file: str, io: bool, piece_bytes: int
) -> Section:
    """Look at an S3 tier; ``config_file`` is for the words of mends, ``io``: measure."""
    address = S3Address.of(tier)
    section = Section("s3", f"S3 tier {address.where} (mover: {tier.mover})")
    section.facts = {"where": address.where, "mover": tier.mover, "region": None, "taken": None, "io": None}
    quick = tier.model_copy(update={"request_timeout_s": min(PATIENCE_S, tier.request_timeout_s)})
    doing(f"asking the AWS chain for credentials for {address.where}")
    endpoint, region = address.endpoint or "https://s3.amazonaws.com", address.region
    credentials: Line
    try:
        from nixl_offload.stores.boto3 import client_facts

        facts = client_facts(quick)
        endpoint, region = facts.endpoint, facts.region
        credentials = credentials_line(facts.credentials)
    except ImportError:
        credentials = unknown("credentials", "cannot be looked for without boto3", "pip install nixl-offload[s3]")
    except StoreError as error:
        if error.__cause__ is None:  # no client could be made, which the endpoint's line says
            credentials = unknown("credentials", "not looked for before that is mended")
        else:
            credentials = no_credentials_line(error)
    doing(f"reaching {endpoint}")
    reached = reach(quick, endpoint, PATIENCE_S)
    section.add(reached.lines)
    section.lines.append(credentials)
    style = "path" if address.path_style else "virtual"
    section.lines.append(ok("addressing", f"{style} style: the bucket is part of the {_PART[style]}"))
    if not reached.answers or credentials.state == "wrong":
        missing = "credentials" if reached.answers else "a connection"
        section.lines.append(unknown("permissions", f"not tried without {missing}"))
        return section
    _try(section, quick, reached, region, trials, doing, config_file=config_file, io=io, piece_bytes=piece_bytes)
    return section


_PART: Final = {"path": "path", "virtual": "host name"}


def _try(
    section: Section,
    tier: S3Config,
    reached: Reached,
    region: str | None,
    trials: Trials,
    doing: Doing,
    *,
    config_file: str,
    io: bool,
    piece_bytes: int,
) -> None:
    """Sign requests. With a region that is wrong all else is tried with the right one, so that one run tells all."""
    right = reached.region
    differs = right is not None and right != region and not (right in _GLOBAL and region in _GLOBAL)
    doing(f"trying what is allowed in {section.facts['where']}")
    # What is not signed may be sent elsewhere though the region is right.
    if (reached.redirects and (right is None or differs)) or _refused_for_region(tier):
        right = right if right is not None and right != region else _bucket_region(tier)
        tier = _moved(section, tier, region, right)
        if right is None:
            return
        differs = False
    elif right is not None and not differs:
        section.lines.append(ok("region", right))
    try:
        tried = _rights(tier, config_file)
        if tried.region is not None and tried.refusal is not None and tried.region != tier.region:
            tier = _moved(section, tier, region, tried.region)
            right, differs = tried.region, False
            tried = _rights(tier, config_file)
    except NotSupportedError as error:
        section.lines.append(wrong("permissions", str(error), "pip install nixl-offload[s3]"))
        return
    if tried.refusal is not None:
        # What the answer says is about a line that may stand there already, and then it is that line's.
        section.lines = [line for line in section.lines if line.name != tried.refusal.name]
        section.lines += [tried.refusal, unknown("permissions", "not tried before that is mended")]
        return
    if differs:
        section.lines.append(region_line(tier, region, right, works=True))
    elif right is None:
        section.lines.append(ok("region", f"{region or 'the default'}; the server names none of its own"))
    section.facts["region"] = right or region
    section.lines.append(ok("bucket", f"{tier.bucket} is there"))
    section.add(tried.lines)
    section.add(lifecycle_lines(tier, config_file))
    if not tried.works:
        section.lines.append(unknown("movers", "not tried: they put objects, get them and remove them"))
        return
    doing(f"trying movers with {section.facts['where']}", long="NIXL brings torch along")
    _add_movers(section, tier, trials.run("objects", tier=tier.to_dict(), io=io, piece_bytes=piece_bytes))


def _refused_for_region(tier: S3Config) -> bool:
    """Whether a client that follows no redirects is sent elsewhere: boto3 follows them, and nobody else does."""
    try:
        store = open_store(tier, "obstore")
    except NotSupportedError:
        return False
    with closing(store):
        try:
            next(iter(store.list("check/")), None)  # one page of nothing
        except StoreError as error:
            return is_about_region(error)
    return False


def _bucket_region(tier: S3Config) -> str | None:
    """Return where the bucket is, as boto3 finds out; None where it cannot."""
    try:
        from nixl_offload.stores.boto3 import bucket_region

        return bucket_region(tier)
    except (ImportError, StoreError):
        return None


def _moved(section: Section, tier: S3Config, configured: str | None, right: str | None) -> S3Config:
    """Say that the region is wrong; return the tier with the right one."""
    section.lines = [line for line in section.lines if line.name != "region"]
    line = region_line(tier, configured, right)
    section.lines.append(line._replace(words=f"{line.words}; what follows was tried with {right}") if right else line)
    return tier.model_copy(update={"region": right or tier.region})


def _rights(tier: S3Config, config_file: str) -> Any:
    try:
        store = open_store(tier, "boto3")
    except NotSupportedError:
        store = open_store(tier)
    with closing(store):
        return try_rights(tier, store, config_file, time.time)


def _add_movers(section: Section, tier: S3Config, answer: Answer) -> None:
    if "failed" in answer:
        mend = "mover: auto" if tier.mover != "auto" else "pip install nixl-offload[s3]"
        section.lines.append(wrong("movers", f"none works: {answer['failed']}", mend))
        return
    passed: list[tuple[str, str]] = []
    for probe in answer["movers"]:
        title = f"mover {probe['name']}"
        if probe["ok"]:
            section.lines.append(ok(title, f"{probe['reason']}: this is the one that the server takes"))
            section.facts["taken"] = probe["name"]
        else:
            passed.append((title, f"passed over: {probe['reason']}"))
    taken = section.facts["taken"]
    section.add(warning(title, words, f"mover: {taken}, if that will do, is tried alone") for title, words in passed)
    section.facts["movers"] = answer["movers"]
    io = answer.get("io")
    if io is None:
        return
    section.facts["io"] = None if "failed" in io else io
    section.lines.append(speed_line(io))
    if io.get("left"):
        names = " ".join(io["left"])
        words = f"objects of the measurement could not be removed: {names}"
        section.lines.append(warning("left behind", words, "run this check again in a minute: it removes them"))
