"""Apathetic Future Share (AFS, NSDI'21), with and without known lengths."""
