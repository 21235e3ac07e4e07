"""A load test and a failover test that anyone can run."""
