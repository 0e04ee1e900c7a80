"""The audit log: acts of administrators and decisions about sharing, in files whose records are chained by hashes."""
