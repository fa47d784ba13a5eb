"""Sharded models (FSDP2) whose workers change while they train."""
