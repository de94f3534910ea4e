"""Starting a run's services. `up` is the orchestration; `local` is the launcher that makes child processes on this machine."""
