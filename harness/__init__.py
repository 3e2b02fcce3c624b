"""The harness every stage runs through, up to the contract in `harness.stage`."""
