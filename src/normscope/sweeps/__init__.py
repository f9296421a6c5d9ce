"""Many runs of one experiment, on this machine or on a Ray cluster, with one table of them all."""
