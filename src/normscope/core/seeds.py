"""Seeds for independent random streams."""

from zlib import crc32

import numpy as np


def stream_seed(seed: int, stream: str, index: int = 0) -> int:
    """A seed for piece ``index`` of a named random stream, so that any piece can be drawn without the ones before it."""
    state = np.random.SeedSequence([seed, crc32(stream.encode()), index]).generate_state(1, np.uint64)
    return int(state[0] >> 1)
