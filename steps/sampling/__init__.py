"""The shard writers and the result of the step `sample`."""
