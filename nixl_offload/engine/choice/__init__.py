"""The parts of ``engine.choose``: what a choice is, on which machine it holds, where it is kept, how it is measured."""
