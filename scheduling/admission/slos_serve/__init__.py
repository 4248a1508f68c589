"""SLOs-Serve admission: the policy, which requests to take, and the dynamic program for that."""
