"""Draws docs/algorithms.png from docs/curves.json, which examples/sort_letters/run_all.py writes: `python docs/curves.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
TITLES = {
    "grpo": "GRPO",
    "gspo": "GSPO",
    "sapo": "SAPO",
    "cispo": "CISPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "ppo": "PPO, critic",
    "opd": "OPD, cold student",
}
SMOOTH = 5


def main() -> None:
    curves: dict[str, Any] = json.loads((HERE / "curves.json").read_text())
    figure, axes = plt.subplots(2, 4, figsize=(12, 5), sharey=True, layout="constrained")
    for axis, (name, title) in zip(axes.flat, TITLES.items(), strict=True):
        found = {key.partition("/")[2]: one for key, one in curves.items() if key.startswith(f"{name}/")}
        for seed, one in sorted(found.items()):
            rewards = one["rewards"]
            smooth = [sum(rewards[max(0, i - SMOOTH + 1) : i + 1]) / min(i + 1, SMOOTH) for i in range(len(rewards))]
            axis.plot(range(1, len(smooth) + 1), smooth, label=f"seed {seed}: {one['last']:.2f}")
        if found:
            bar = next(iter(found.values()))["bar"]
            axis.axhline(bar, color="gray", linestyle=":", linewidth=1)
        axis.set_title(title, fontsize=10)
        axis.set_ylim(0, 1)
        axis.legend(fontsize=8, loc="lower right")
        axis.grid(alpha=0.3)
    figure.supxlabel("update", fontsize=9)
    figure.supylabel(f"reward of the sampled completions, mean of {SMOOTH} updates", fontsize=9)
    figure.savefig(HERE / "algorithms.png", dpi=90, metadata={"Software": ""})


if __name__ == "__main__":
    main()
