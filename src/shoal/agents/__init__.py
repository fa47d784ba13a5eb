"""Agents: small processes on machines that run workers, and the control plane's side of them."""
