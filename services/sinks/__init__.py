"""Hands a run's metrics and events on to other systems: one file a sink, `follow` reads the streams for all of them."""
