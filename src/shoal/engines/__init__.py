"""Engines provide machines: each launcher requests them, runs an agent on each, watches them and returns them.

`base` has the interface and its values, `capacity` the rule that says how many machines to hold. `slurm` uses the
Slurm commands. `ray` talks to `ray_launcher`, a process of its own, so that this package never imports Ray.
"""
