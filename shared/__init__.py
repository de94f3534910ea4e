"""What every Slipstream service and every tool of a user imports: records, wire format, subjects, queue, config.

Imports no service and no torch, so that a metrics subscriber, a curator or an evaluator can depend on it alone.
"""
