"""Ray Serve below the router: its replicas, connections to them, and its choice of one."""
