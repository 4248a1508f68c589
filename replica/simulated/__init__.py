"""An engine of simulated steps, for fleets larger than this machine."""
