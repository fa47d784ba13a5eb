"""Policies: how many GPUs each job gets. Pure functions of a view of the jobs, one policy per file or folder."""
