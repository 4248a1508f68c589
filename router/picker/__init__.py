"""The endpoint picker: a router as the external processor of an Envoy that people already have."""
