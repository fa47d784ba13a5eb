"""The addresses of the API. Each function checks who asks, calls one thing, and shapes the answer."""
