"""Inference engines behind one HTTP contract: `client` speaks it, `process` starts one, `light` is our own."""
