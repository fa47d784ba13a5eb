"""Shoal shares a GPU cluster among many deep-learning training jobs, elastically and fairly."""

__version__ = "0.1.0"
