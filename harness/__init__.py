"""The one harness every stage runs through: problems, inputs, timing, peers, machine code, models,
results."""
