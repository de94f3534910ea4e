"""The five services of Slipstream: controller, rollout, reward, trainer, dcs. Each folder's `main.py` is its story."""
