"""KV events for routers and indexers outside of Pando, in vLLM's format."""
