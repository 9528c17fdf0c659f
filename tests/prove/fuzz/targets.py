"""All targets, by name."""

from __future__ import annotations

from tests.prove.fuzz import answers, stored, texts

TARGETS = {target.name: target for part in (stored, texts, answers) for target in part.targets()}
