"""Documents from stores: listings, byte ranges, retries, Parquet."""
