"""Fair sharing between users: water-filling, stride, split stride, balancing, trading, profiling."""
