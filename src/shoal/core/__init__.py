"""Values and lifecycles: jobs, clusters, topology, plans, reasons. No I/O, no clock, no hidden randomness."""
