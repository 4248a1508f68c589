"""Configuration, the Serve application, and the command line."""
