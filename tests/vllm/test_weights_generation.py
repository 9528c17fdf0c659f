"""Weights that change in a running vLLM: nothing computed with the old ones is served afterwards, by this server or by
another that shares the tier, and what was stored before stays for those who have them.
"""

from __future__ import annotations

from tests.vllm.damage import ENGINE_OPTIONS, FULL_TOKENS, chunk_prompts, hits, said
from tests.vllm.harness import Answer, Engine, Workshop, chain_config, same
from tests.vllm.media import tree

PROMPTS = chunk_prompts(1, seed=1402)


def ask(engine: Engine, *, connector: bool = False) -> list[Answer]:
    """Reset, as whoever replaces weights does, and answer."""
    assert engine.settle()
    assert engine.reset_prefix_cache(connector=connector)
    answers = engine.generate(PROMPTS)
    assert engine.settle()
    return answers


def test_weights_replaced_in_place(workshop: Workshop) -> None:
    """Through memory, a slab and a directory that a second server shares, which has the weights of the start."""
    shared = tree(workshop.scratch / "kv-weights")
    tiers = (
        {"kind": "memory", "capacity": "32MiB"},
        {"kind": "slab", "path": str(workshop.scratch / "slab-weights"), "capacity": "128MiB"},
        shared.tier,
    )
    with workshop.start_engine(**ENGINE_OPTIONS) as plain:
        old = plain.generate(PROMPTS)
        plain.worker("scale_weights", 0, 2.0)
        assert plain.reset_prefix_cache()
        new = plain.generate(PROMPTS)
    assert not same(old, new), "the weights make no difference"
    with workshop.start_engine(connector=chain_config(*tiers), **ENGINE_OPTIONS) as server:
        assert same(server.generate(PROMPTS), old)
        found = ask(server)
        assert same(found, old)
        assert hits(found) == FULL_TOKENS, said(server)
        (namespace,) = shared.namespaces()
        server.worker("scale_weights", 0, 2.0)
        first = ask(server)
        assert same(first, new)
        assert hits(first) == 0
        assert same(ask(server), new)  # stored by now, unless the first had ended before the tiers were open
        again = ask(server)
        assert same(again, new)
        assert hits(again) == FULL_TOKENS, f"the new weights have a cache of their own{said(server)}"
        assert len(shared.namespaces()) == 2
        with workshop.start_engine(connector=shared.config(), **ENGINE_OPTIONS) as other:
            theirs = other.generate(PROMPTS)
            assert same(theirs, old)
            assert hits(theirs) == FULL_TOKENS, "the namespace of the start is as it was"
            # Another server that gets the same update shares what was computed with it.
            other.worker("scale_weights", 0, 2.0)
            assert same(ask(other), new)
            theirs = ask(other)
            assert same(theirs, new)
            assert hits(theirs) == FULL_TOKENS, said(other)
            other.stop()
        # The old weights again: what the slab holds of them is found, and only that.
        server.worker("scale_weights", 0, 0.5)
        assert same(ask(server), old)
        back = ask(server)
        assert same(back, old)
        assert hits(back) == FULL_TOKENS, said(server)
        # A reset of the connector without other weights: cleared, as ever, and in no other namespace.
        assert same(ask(server, connector=True), old)
        assert len(shared.namespaces()) == 2
        # Replaced without a reset of vLLM's own cache, which holds blocks of the old ones: nothing is stored.
        shards = shared.shards()
        server.worker("scale_weights", 0, 2.0)
        server.call("reset_connector_alone")
        server.generate(PROMPTS)
        assert server.settle()
        assert shared.shards() == shards
        assert "Nothing is stored or loaded until" in server.log.read_text(errors="replace")
        assert same(ask(server), new)
        server.stop()
    assert namespace in shared.namespaces()
