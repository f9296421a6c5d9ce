"""Constants that measures and their figures share."""

NOISE = 0.1  # RMS of the relative noise at which heads and models are compared
DRAWN_HEADS = 12  # more single lines than these cannot be distinguished
TOKEN_LENGTH = 24  # characters of a token in a table
FAILS = "fails as printed"  # the verdict on a published claim that has a counterexample
