"""`python -m services.controller.cli`: how the launchers start services, whatever is on the PATH."""

from __future__ import annotations

from . import main

main()
