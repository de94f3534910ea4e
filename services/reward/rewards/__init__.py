"""Rewards that come along, one file each. They are named in a run file by dotted path, like anybody's own."""
