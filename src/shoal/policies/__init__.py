"""How many: one policy per file. Pure functions of a view of the jobs."""
