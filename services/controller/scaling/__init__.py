"""More and fewer replicas while a run goes on: `operation` decides, `scaler` does it, `routes` is the REST API."""
