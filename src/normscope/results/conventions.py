"""Constants that measures and their figures share."""

NOISE = 0.1  # RMS of the relative noise at which heads and models are compared
DRAWN_HEADS = 12  # more single lines than these cannot be distinguished
TOKEN_LENGTH = 24  # characters of a token in a table
NORM_BAND = 0.2  # published for Pre-LN: 90 % of the norms are within ±20 % of the median
NEAR_ONE_HOT, DIFFUSE = 0.95, 0.70  # largest weight of an attention row from which it is sparse, and below which it is not
FEWEST_ROWS = 50  # near-one-hot rows of a head below which nothing is concluded about it
HOLDS, IN_RANGE, FAILS = "holds", "holds in the tested range", "fails as printed"  # verdicts on a published claim
