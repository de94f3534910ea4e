"""Real SGLang as a replica's engine: how it is started, and what is hooked into it. See docs/sglang.md."""
