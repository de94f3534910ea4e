"""The trainer service: owns the policy, its optimiser and its checkpoints."""
