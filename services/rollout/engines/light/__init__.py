"""A small inference engine on plain torch with SGLang's HTTP API: continuous batching, staged weight updates, seeded sampling."""
