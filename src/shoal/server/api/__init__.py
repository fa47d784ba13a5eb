"""The HTTP API: routes, models, errors and limits."""
