"""The control loop: one thread that decides, records and carries out."""
