"""One file for each way to relax top-k; importing the file files its row in the registry."""
