"""The traffic of the experiments: public traces read by path, and seeded generators."""
