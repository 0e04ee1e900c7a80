"""The ledger: the tokens that each tenant and subject has used, counted once for each request."""
