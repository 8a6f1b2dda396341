"""Bytes and plans from a configuration and a model's profile. No torch, so the service can ask."""
