"""The simulator's files: jobs, profiles and clusters. Readers check them and report errors by line."""

from shoal.sim.inputs.cluster_file import read_cluster
from shoal.sim.inputs.jobs_file import cluster_with_users_of, read_jobs
from shoal.sim.inputs.profiles_file import profiles_of, read_profiles
from shoal.sim.inputs.write_files import (
    check_not_read,
    check_table_name,
    check_writable,
    jobs_table,
    profiles_table,
    write_aside,
    write_jobs,
    write_profiles,
    write_tables,
)

__all__ = [
    "check_not_read",
    "check_table_name",
    "check_writable",
    "cluster_with_users_of",
    "jobs_table",
    "profiles_of",
    "profiles_table",
    "read_cluster",
    "read_jobs",
    "read_profiles",
    "write_aside",
    "write_jobs",
    "write_profiles",
    "write_tables",
]
