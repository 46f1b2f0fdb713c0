"""Where outputs are kept: objects, manifests, ledgers, leases, and deleting what is not needed."""
