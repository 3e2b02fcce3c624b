"""What checks, measures and reports on the stages: for development, never imported by the library."""
