"""Runs one schedule of a scenario again and prints what happened: ``python -m tests.prove.races NAME SCHEDULE``.

NAME and SCHEDULE are those of a finding. Without SCHEDULE: tells how long schedules of it take.
"""

from __future__ import annotations

import os
import sys
import tempfile

from tests.prove.races.exploring import replay, timed
from tests.prove.races.loading import scenario_of


def main(name: str, words: str = "") -> int:
    """Run it in a scratch directory; 1 when something was found."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of keys is part of a schedule
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.prove.races", name, *filter(None, [words])])
    scenario = scenario_of(name)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        if not words:
            print(f"{timed(scenario) * 1e3:.1f} ms a schedule")
            return 0
        ran, missed = replay(scenario, words)
        print(*ran.scheduler.trace or (), sep="\n")
        if missed:
            print(f"{missed} deviations could not be followed: this is not the code that the schedule was found with")
        if ran.failure is not None:
            print(f"{ran.failure.kind}: {ran.failure.words}")
        else:
            print("nothing was found")
        os.chdir("/")
        sys.stdout.flush()
    os._exit(ran.failure is not None)  # threads may be left


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
