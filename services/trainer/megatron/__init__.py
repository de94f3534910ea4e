"""The policy on megatron-core. Importing this package applies `compat`, which must come before megatron's own import."""

from services.trainer.megatron.compat import install

COMPAT_PARTS = install()
"""The compatibility parts in force; empty on a machine with CUDA."""
