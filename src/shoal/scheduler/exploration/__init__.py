"""Measure jobs at sizes that they have not run at, where the next decision depends on it."""
