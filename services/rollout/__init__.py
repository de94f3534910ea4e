"""The rollout service: one inference engine, and the loop that turns prompts into scored requests."""
