"""Executing requests, shards and gangs on Ray; imported only when a step must run there."""
