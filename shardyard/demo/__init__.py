"""``shardyard demo``: a real model, real data, one job, and what came of it."""
