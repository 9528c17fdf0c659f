"""The findings of ``nixl-offload check``, printed as text or JSON.

Threading: immutable values; one thread prints.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from nixl_offload.tiers.inspect import printable

State = Literal["ok", "warning", "wrong", "unknown"]
_STATES: Final = ("ok", "warning", "wrong", "unknown")
_NAME_CHARS: Final = 20
_CHARS: Final = 2000
"""The longest text of a finding; paths and servers' answers may contain anything."""


class Finding(NamedTuple):
    """The result of one probe."""

    name: str
    """The name of the probe, the same in every run."""
    state: State
    words: str
    """The result and its consequence."""
    fix: str | None = None
    """A command or a line of the config that fixes it or shows more."""


class Section(NamedTuple):
    """Findings about the environment or one tier. Probes run while their findings are printed."""

    kind: str
    """``environment``, or the kind of a tier."""
    title: str
    findings: Iterable[Finding]


def report(sections: Iterable[Section], *, as_json: bool) -> bool:
    """Print all findings. Returns whether nothing is wrong."""
    counts, plain = Counter[str](), list[dict[str, Any]]()

    def say(text: str | None) -> None:
        if not as_json:
            print(text, flush=True)

    for kind, title, findings in sections:
        made = list[dict[str, Any]]()
        plain.append({"kind": kind, "title": title, "findings": made})
        say(printable(title, _CHARS))
        for found in findings:
            counts[found.state] += 1
            made.append(found._asdict())
            say(f"  {found.state:<7}  {found.name:<{_NAME_CHARS}}  {printable(found.words, _CHARS)}")
            if found.fix:
                say(f"{'fix: ':>{_NAME_CHARS + 18}}{printable(found.fix, _CHARS)}")
        say("")
    if as_json:
        print(json.dumps({"works": not counts["wrong"], "sections": plain}, indent=2))
    else:
        verdict = {0: "Nothing is wrong", 1: "One thing is wrong"}.get(counts["wrong"], "Some things are wrong")
        print(f"{verdict}: {', '.join(f'{counts[state]} {state}' for state in _STATES if counts[state])}.")
    return not counts["wrong"]


def mover_findings(choice: str, answer: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the mover that a server would use, those that fail, and the speed. ``answer``: the child's."""
    if "failed" in answer:
        fix = "mover: auto" if choice != "auto" else "what it says above; the server's log says more"
        yield Finding("movers", "wrong", f"none works: {answer['failed']}", fix)
        return
    for probe in answer["movers"]:
        if probe["ok"]:
            yield Finding(f"mover {probe['name']}", "ok", probe["reason"])
        else:
            words = f"passed over: {probe['reason']}"
            yield Finding(f"mover {probe['name']}", "warning", words, "another mover, or what it lacks")
    if "read_bytes_s" in answer:
        read, write = (answer[name] / 1e6 for name in ("read_bytes_s", "write_bytes_s"))
        yield Finding("speed", "ok", f"read {read:,.0f} MB/s, write {write:,.0f} MB/s")
