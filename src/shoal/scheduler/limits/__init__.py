"""Which jobs may run now, and how large they may be: limits of users and groups, and conditions of jobs."""
