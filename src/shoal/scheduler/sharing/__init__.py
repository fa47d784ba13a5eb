"""GPU sharing on top of any policy: co-location and pre-scheduling (Liquid, TPDS 2021). Decisions only."""
