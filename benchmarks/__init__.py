"""Speed and memory, each as a ratio against a named baseline in one run; each ends with one line of JSON."""
