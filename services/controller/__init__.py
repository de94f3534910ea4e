"""The controller service, the command line and what they read a run with: audit, report, live view."""
