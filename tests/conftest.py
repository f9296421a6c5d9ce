"""One thread for every test and every process it starts: they are small, and on a busy machine waiting threads cost time."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
