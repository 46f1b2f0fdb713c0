"""The store of outputs: objects, manifests, ledgers, leases, and garbage collection."""
