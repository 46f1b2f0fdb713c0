"""Executing requests, shards and gangs on Ray; imported only when something must run there."""
