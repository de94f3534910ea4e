"""DAPO's overlong shaping: within the last `buffer` tokens before the limit the reward falls linearly by up to `penalty`.

    0 where length <= limit - buffer,  penalty (length - (limit - buffer)) / buffer above

Paper: arXiv 2503.14476, equation 13: limit 20480, buffer 4096, penalty 1.
"""

from __future__ import annotations

import numpy as np


def overlong_penalty(lengths_G: np.ndarray, limit: int, buffer: int, penalty: float) -> np.ndarray:
    """[G] what is taken from the reward."""
    over_G = np.asarray(lengths_G, dtype=np.float64) - (limit - buffer)
    return penalty * np.clip(over_G / buffer, 0.0, 1.0)
