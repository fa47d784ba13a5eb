"""The cycle that ties policy, placement and knowledge together: events in, commands out."""
